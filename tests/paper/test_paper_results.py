"""The paper's numbers as we hold them: well-formed always, and equal to every table of the LaTeX source where it is at hand."""

import os
import re
from pathlib import Path

import pytest

from letkd.recipes import list_cells, list_methods, list_pairs, resolve
from letkd.report.paper import MODERN, PaperResult, paper_result, paper_results, published_results

NAMED = os.environ.get("LETKD_PAPER")
PAPER = Path(NAMED) if NAMED else Path(__file__).parents[3] / "shared" / "paper" / "letkd.tex"


# What is true of the numbers whether or not the source is at hand.


def test_a_cell_is_found_directly():
    assert paper_result("cifar100/rn56-rn20/letkd-2") == PaperResult(73.27, std=0.16, n=5)
    assert paper_result("tiny-imagenet/rn50-mnv2/letkd-1") == PaperResult(60.69, std=0.17, n=3)
    assert paper_result("imagenet/rn34-rn18/letkd-2") == PaperResult(72.38, top5=91.15)
    assert paper_result("cifar100/rn110-rn20/dkd") is None, "the table has a dash"
    assert paper_result("digits/tiny/kd") is None


def test_every_number_is_an_accuracy():
    assert len(paper_results()) == 271
    for cell, result in paper_results().items():
        assert cell.count("/") == 2
        assert 50 < result.mean < 80, cell
        assert result.std is None or 0 < result.std <= 0.5, cell
        assert result.top5 is None or result.mean < result.top5 < 93, cell
        assert (result.top5 is not None) == cell.startswith("imagenet/"), cell
        assert result.read_off == cell.startswith("cifar100-k-inter/"), cell


def test_every_pair_and_method_of_cifar100_has_a_recipe():
    held = [cell for cell in paper_results() if cell.startswith("cifar100/")]
    assert set(held) <= set(list_cells())
    assert {cell.rpartition("/")[0] for cell in held} == {pair for pair in list_pairs() if pair.startswith("cifar100/")}
    others = [cell for cell in paper_results() if cell.startswith(("imagenet/", "tiny-imagenet/"))]
    assert {cell.rpartition("/")[2] for cell in others} <= set(list_methods())


def test_published_numbers_are_accuracies_of_other_methods_with_their_sources():
    assert not published_results().keys() & paper_results().keys()
    assert set(published_results()) <= set(list_cells())
    assert {cell.rpartition("/")[2] for cell in published_results()} == {
        name for name in MODERN if not name.startswith("letkd")
    }
    for cell, result in published_results().items():
        pair = cell.rpartition("/")[0]
        student, teacher = paper_result(f"{pair}/ce"), paper_result(f"{pair}/teacher")
        assert student.mean < result.mean < (80 if teacher is None else teacher.mean + 3), cell
        assert result.source, cell
        assert ("epoch" in result.mark) == ("logit-standardization" in result.source), cell
        assert paper_result(cell) == result


def test_only_letkd_has_a_std_and_in_the_main_tables_always():
    for cell, result in paper_results().items():
        data, pair, method = cell.split("/")
        ours = data in ("cifar100", "tiny-imagenet") and method in ("letkd-1", "letkd-2") and pair != "rn83-rn29"
        assert (result.std is not None) == ours, cell


# Supplement, "Hyperparameters": α = 1 in all models except these; the ablations' own zeros stay.
ALPHAS = {
    "cifar100/rn50-mnv2": {"penultimate": 0.1, "intermediate": 0.2},
    "tiny-imagenet/rn50-mnv2": {"penultimate": 0.5, "intermediate": 1.0},
}
ZEROS = {("letkd-2-01", "intermediate"), ("letkd-2-10", "penultimate")}


@pytest.mark.parametrize("pair", list_pairs())
def test_every_row_with_a_kd_layer_takes_the_papers_alpha(pair):
    rows = [method for method in list_methods() if "letkd" in resolve(pair, method=method).methods]
    assert {"letkd-1", "letkd-1-2", "letkd-1-3x3", "letkd-2", "letkd-inter-1", "fitnet-layer", "fitnet-letkd-1"} <= set(rows)
    for method in rows:
        for role, site in resolve(pair, method=method).methods["letkd"]["sites"].items():
            expected = 0.0 if (method, role) in ZEROS else ALPHAS.get(pair, {}).get(role, 1.0)
            assert site.get("alpha", 1.0) == expected, (method, role)


def test_the_grid_of_alphas_holds_quest_and_letkd():
    for parts, method in [("penult-0", "quest"), ("penult-1", "letkd-1"), ("inter-1-penult-1", "letkd-2")]:
        assert paper_result(f"cifar100-alpha/rn56-rn20/{parts}").mean == paper_result(f"cifar100/rn56-rn20/{method}").mean


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (PaperResult(70.5), "70.50"),
        (PaperResult(70.5, std=0.1, n=5), "70.50 ± 0.10"),
        (PaperResult(70.5, read_off=True), "about 70.50"),
    ],
)
def test_as_text(result, text):
    assert str(result) == text


# The tables of the source.

Number = tuple[float, float | None]  # mean and std


def table_rows(body: str) -> list[list[str]]:
    """The cells of a tabular's rows as plain text, a number with its std as `mean±std`."""
    body = re.sub(r"\\(?:top|mid|bottom)rule|\\cmidrule\{[\d-]+\}", "", body)
    rows = [[plain(cell) for cell in row.split("&")] for row in re.split(r"\\\\", body)]
    return [row for row in rows if any(row)]


def plain(cell: str) -> str:
    cell = re.sub(r"\\underset\{\\scriptsize\{\\mp([\d.]+)\}\}\{([\d.]+)\}", r"\2±\1", cell)
    cell = re.sub(r"\\underset\{\\text\{(.*?)\}\}\{\\text\{(.*?)\}\}", r"\2\1", cell)
    cell = re.sub(r"\\multi(?:row|column)\{\d\}\{[^}]*\}", "", cell)
    cell = re.sub(r"\\(?:textbf|mathbf)", "", cell)
    return re.sub(r"[{}$]", "", cell).strip()


def number(cell: str) -> Number:
    mean, _, std = cell.partition("±")
    return float(mean), float(std) if std else None


def is_number(cell: str) -> bool:
    return re.fullmatch(r"\d\d\.\d\d(±0\.\d\d)?", cell) is not None


def network(name: str) -> str:
    return name.lower().replace("wrn-", "wrn")


def method(name: str) -> str:
    return re.sub(r" \((\d)\)", r"-\1", name).lower().replace("+", "-")


def pairs_in_columns(data: str, rows: list[list[str]]) -> dict[str, Number]:
    """Teachers and students above, two rows of their own accuracies, then a row a method."""
    at = next(k for k, row in enumerate(rows) if row[0] == "Teacher")
    pairs = [f"{network(t)}-{network(s)}" for t, s in zip(rows[at][1:], rows[at + 1][1:], strict=True)]
    named = [["teacher", *rows[at + 2][1:]], ["ce", *rows[at + 3][1:]]] + [[method(row[0]), *row[1:]] for row in rows[at + 4 :]]
    cells = {}
    for name, *values in named:
        for pair, value in zip(pairs, values, strict=True):
            if is_number(value):
                cells[f"{data}/{pair}/{name}"] = number(value)
            else:
                assert value == ("" if pair == "-" else "-"), (name, pair, value)
    return cells


def imagenet(rows: list[list[str]]) -> dict[str, Number]:
    names = ["ce" if name == "Student" else method(name) for name in rows[0][2:]]
    cells, pair = {}, ""
    for setting, top, *values in rows[1:]:
        pair = {"(a)": "rn34-rn18", "(b)": "rn50-mnv2", "": pair}[setting]
        suffix = {"Top-1": "", "Top-5": " top5"}[top]
        for name, value in zip(names, values, strict=True):
            cells[f"imagenet/{pair}/{name}{suffix}"] = number(value)
    return cells


def kernels(rows: list[list[str]]) -> dict[str, Number]:
    assert rows[0][1:] == ["3x3 Kernels", "", "K-Means", "Teacher", "Student"]
    names = ["quest-3x3", "letkd-1-3x3", None, "quest", "letkd-1", "teacher", "ce"]
    assert rows[1][1:6] == ["QUEST", "letKD-1", "", "QUEST", "letKD-1"]
    return {
        f"cifar100/{row[0].lower()}/{name}": number(value)
        for row in rows[2:]
        for name, value in zip(names, row[1:], strict=True)
        if name is not None
    }


def two_layers(rows: list[list[str]]) -> dict[str, Number]:
    return {f"cifar100/rn56-rn20/{method(name)}": number(value) for name, value in rows[1:]}


def alphas(rows: list[list[str]]) -> dict[str, Number]:
    cells = {}
    for inter, alpha_inter, penult, alpha_penult, value in rows[1:]:
        sites = [("inter", inter, alpha_inter), ("penult", penult, alpha_penult)]
        parts = [f"{name}-{alpha}" for name, there, alpha in sites if there == r"\checkmark"]
        cells[f"cifar100-alpha/rn56-rn20/{'-'.join(parts)}"] = number(value)
    return cells


def pooled_lda(rows: list[list[str]]) -> dict[str, Number]:
    assert [r"\alpha_inter=0" in rows[0][0], r"\alpha_inter=1" in rows[0][1]] == [True, True]
    assert rows[1] == ["", "x", r"\hatx"]
    keys = ("alpha-0", "alpha-1-x", "alpha-1-x-hat")
    return {f"cifar100-gap-lda/rn56-rn20/{key}": number(value) for key, value in zip(keys, rows[2], strict=True)}


def fitnet_layer(rows: list[list[str]]) -> dict[str, Number]:
    cells = {
        "FitNet": "cifar100-fitnet/rn110-rn32/fitnet",
        "FitNet+KD layer without supervision": "cifar100/rn110-rn32/fitnet-layer",
        "FitNet+KD layer with supervision": "cifar100/rn110-rn32/fitnet-letkd-1",
    }
    return {cells[name]: number(value) for name, value in rows[1:]}


READERS = {
    "tab:cifar100": lambda rows: pairs_in_columns("cifar100", rows),
    "tab:cifar100_sup": lambda rows: pairs_in_columns("cifar100", rows),
    "tab:tinyimagenet": lambda rows: pairs_in_columns("tiny-imagenet", rows),
    "tab:imagenet": imagenet,
    "tab:imagenet_sup": imagenet,
    "tab:3x3_vs_quest": kernels,
    "tab:quest_multi": two_layers,
    "tab:value_effect": alphas,
    "tab:subclass_value_offline": pooled_lda,
    "tab:fitnet": fitnet_layer,
}


@pytest.fixture(scope="module")
def source() -> str:
    """The LaTeX source without its comments."""
    if NAMED and not PAPER.exists():
        pytest.fail(f"LETKD_PAPER names {PAPER}, which does not exist")
    if not PAPER.exists():
        pytest.skip("the paper's LaTeX source is not here; set LETKD_PAPER to its path to compare every number with it")
    return re.sub(r"(?<!\\)%.*", "", PAPER.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tables(source) -> dict[str, str]:
    """The bodies of the tabulars, by label."""
    pattern = r"\\label\{(tab:\w+)\}((?:(?!\\label\{).)*?)\\begin\{tabular\}\{[^}]*\}(.*?)\\end\{tabular\}"
    return {label: body for label, _, body in re.findall(pattern, source, re.S)}


def test_all_tables_are_read(source, tables):
    assert tables.keys() == READERS.keys()
    assert source.count(r"\begin{tabular}") == len(READERS)


@pytest.mark.parametrize("label", READERS)
def test_every_number_of_a_table_is_held(tables, label):
    cells = READERS[label](table_rows(tables[label]))
    assert len(cells) == len(re.findall(r"\d\d\.\d\d", tables[label])), "a number was not read"
    assert sum(std is not None for _, std in cells.values()) == tables[label].count(r"\mp")
    for name, (mean, std) in cells.items():
        cell, _, top5 = name.partition(" ")
        held = paper_result(cell)
        assert held is not None, cell
        assert (held.top5 if top5 else held.mean) == mean, name
        if std is not None:
            assert held.std == std, name


def test_nothing_is_held_that_no_table_prints(tables):
    printed = {name.partition(" ")[0] for label, read in READERS.items() for name in read(table_rows(tables[label]))}
    assert {cell for cell, result in paper_results().items() if not result.read_off} == printed


def test_trials_are_the_papers(source, tables):
    said: dict[str, set[int]] = {}
    for label, read in READERS.items():
        caption = re.search(rf"\\caption\{{([^\n]*)\}}\s*(?:\\vspace\S*\s*)?\\label\{{{label}\}}", source)[1]
        sentences = [part for part in source.split("\n") if re.search(rf"\\cref\{{{label}\}}", part)]
        trials = {int(n) for text in [caption, *sentences] for n in re.findall(r"over (\d) trials", text)}
        for name in read(table_rows(tables[label])):
            said.setdefault(name.partition(" ")[0], set()).update(trials)
    for cell, trials in said.items():
        n = paper_result(cell).n
        assert trials == (set() if n is None else {n}), cell
