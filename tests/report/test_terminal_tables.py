"""Tables in terminals, pipes and logs of 80 columns: no name and no number is cut off."""

import io

import pytest
from rich.console import Console

from letkd.progress import show
from letkd.report.results_table import as_rich as rows_as_rich
from letkd.runs.grid import Cell, Grid, as_rich
from letkd.runs.records import Result
from letkd.runs.results import Row

METHODS = ["Student", "letKD-1+KD-LS", "FitNet + KD layer, no supervision"]
SETTINGS = "letKD-2 (letkd.sites.intermediate.supervision.K 16)"


def rows(names: list[str], seeds: int) -> list[Row]:
    return [
        Row(
            name,
            [Result(70.0 + k + s / 7, 99.0, None, None, None, 71.0 + s, 1_234_567, 1, 99.0) for s in range(seeds)],
            "",
            name,
            range(seeds),
        )
        for k, name in enumerate(names)
    ]


def columns(text: str) -> list[list[str]]:
    """The words of each column of the body, from the first row to the last."""
    lines = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return [str(" ".join(cells)).split() for cells in zip(*lines, strict=True)]


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("names", [METHODS, [*METHODS, SETTINGS]])
def test_results_at_80_columns(monkeypatch, capsys, names, seeds):
    monkeypatch.setenv("COLUMNS", "80")
    show(rows_as_rich(rows(names, seeds), "a pair", "Student"))
    out = capsys.readouterr().out
    assert "…" not in out
    method, test, _, _, _, parameters, _ = columns(out)
    assert method == " ".join(names).split()
    assert test.count("70.00") == (seeds == 1)
    assert parameters == ["1,234,567"] * len(names)
    head = [line.strip("┃").split("┃") for line in out.splitlines() if line.startswith("┃")]
    assert [" ".join(" ".join(cells).split()) for cells in zip(*head, strict=True)][4:] == [
        "test %, best validation epoch",
        "parameters",
        "time per run",
    ]
    fits = max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert fits == (SETTINGS not in names), "a longer line only if a word does not fit"


def test_the_head_wraps_before_the_cells(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(rows_as_rich(rows(METHODS[:2], 1), "a pair", "Student"))
    body = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(body) == 2, "one line per row"


def test_a_table_that_fits_is_not_wrapped(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    show(rows_as_rich(rows(METHODS, 3), "a pair", "Student"))
    assert len([line for line in capsys.readouterr().out.splitlines() if line[:1] in "┃│"]) == 4


@pytest.mark.parametrize("width", [20, 80])
def test_a_grid_is_not_cut_either(width):
    out = io.StringIO()
    grid = Grid(
        "t",
        ["row", "recipe", "ours, %"],
        [[Cell(SETTINGS), Cell("[bold]letkd-2-sharp_and_long", bold=True), Cell("72.00 ± 1.00")]],
    )
    Console(file=out, width=width).print(as_rich(grid))
    assert columns(out.getvalue()) == [SETTINGS.split(), ["[bold]letkd-2-sharp_and_long"], ["72.00", "±", "1.00"]]


def test_names_from_files_are_shown_as_text(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(rows_as_rich(rows(["[red]x\x1b[2J", "b"], 1), "a pair"))
    assert columns(capsys.readouterr().out)[0] == [r"[red]x\x1b[2J", "b"]
