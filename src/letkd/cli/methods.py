"""`letkd methods`: list the distillation methods."""


def methods() -> None:
    """List every method: its paper, its loss, what it reads from the teacher, what it adds to the student, its defaults."""
    from rich.console import Console
    from rich.markdown import Markdown

    from letkd.progress import bar
    from letkd.report.method_cards import GENERATED, as_markdown

    with bar("reading the methods", None):
        page = as_markdown()
    Console().print(Markdown(page.replace(GENERATED, "")))
