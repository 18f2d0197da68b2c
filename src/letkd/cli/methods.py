"""`letkd methods`: what there is to teach a student with."""


def methods() -> None:
    """List every method: its paper, its loss, what it reads, what it adds to the student, its defaults."""
    from rich.console import Console
    from rich.table import Table

    from letkd.progress import track
    from letkd.report.methods import cards

    table = Table(show_lines=True)
    for name in ("--method", "paper", "loss", "reads of the teacher", "adds at inference", "defaults"):
        table.add_column(name, overflow="fold")
    for card in track(list(cards()), "looking at the methods"):
        table.add_row(card.name, card.papers, card.loss, card.reads, card.adds, card.defaults)
    Console().print(table)
