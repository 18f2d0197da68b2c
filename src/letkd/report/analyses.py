"""The paper's analyses: the rows of each and the paper's numbers for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from letkd.errors import RecipeError, nearest
from letkd.report.charts import Chart, Series
from letkd.report.pair_tables import NONE
from letkd.report.paper import PaperResult, paper_result
from letkd.runs.grid import Cell, Grid
from letkd.runs.results import mean_std

if TYPE_CHECKING:
    from letkd.training.trials import Variant

K_INTER = "methods.letkd.sites.intermediate.supervision.K"


@dataclass(frozen=True)
class Line:
    """A row of an analysis.

    Args:
        method: name of the recipe.
        paper: cell of the paper's number, with `{pair}` for the pair's name.
        settings: changes to the recipe.
        title: default: the recipe's title.
        x: position on the curve, if there is one.
        feature: `x` or `x_hat`, if the analysis is about features.
    """

    method: str
    paper: str
    settings: tuple[str, ...] = ()
    title: str = ""
    x: float | None = None
    feature: str = ""

    @property
    def name(self) -> str:
        """Name of its folder; a row shared by several analyses is trained once."""
        return "-".join([self.method, *(setting.split(".")[-1].replace("=", "-") for setting in self.settings)])


@dataclass(frozen=True)
class Analysis:
    """An ablation table or figure of the paper.

    Args:
        question: the question it answers.
        source: table or figure of the paper.
        pair: the paper's pair for it.
        lines: its rows, in the paper's order.
        x_label: x axis of the curve, if the rows form one.
        measure: computes each row's values from the folders of its runs; None for the test accuracy.
    """

    question: str
    source: str
    pair: str
    lines: tuple[Line, ...]
    x_label: str = ""
    measure: Callable[[Sequence[Line], Mapping[str, Sequence[Path]]], list[list[float]]] | None = None

    def paper(self, line: Line, pair: str) -> PaperResult | None:
        """The paper's number for this pair, or else for the paper's own pair."""
        own, theirs = (line.paper.format(pair=name.rpartition("/")[2]) for name in (pair, self.pair))
        return paper_result(own) or paper_result(theirs)

    def variants(self) -> "list[Variant]":
        from letkd.training.trials import Variant

        rows = {line.name: Variant(line.name, line.method, line.settings) for line in self.lines}
        return list(rows.values())


def _alpha(method: str, cell: str, inter: str, penult: str) -> Line:
    return Line(method, f"cifar100-alpha/{{pair}}/{cell}", title=f"α inter {inter}, penult {penult}")


def _geometry(lines: Sequence[Line], runs: Mapping[str, Sequence[Path]]) -> list[list[float]]:
    """Accuracy of LDA on the feature named by each row."""
    from letkd.report.collect import read_run
    from letkd.report.geometry import geometry
    from letkd.report.opened import RunOpener

    opener = RunOpener(trust=True)  # the same command trained these runs
    found = {}
    for path in {path for paths in runs.values() for path in paths}:
        run = read_run(path)
        found[path] = geometry(opener.distiller(run), opener.data(run))
    return [[found[path][line.feature] for path in runs[line.name]] for line in lines]


ANALYSES = {
    "alpha": Analysis(
        "What does each part of letKD-2 contribute? A dash marks an omitted site; at α = 0 a site is supervised, but "
        "adds nothing to the features.",
        "Table 9",
        "cifar100/rn56-rn20",
        (
            _alpha("letkd-inter-0", "inter-0", "0", NONE),
            _alpha("letkd-inter-1", "inter-1", "1", NONE),
            _alpha("quest", "penult-0", NONE, "0"),
            _alpha("letkd-1", "penult-1", NONE, "1"),
            _alpha("letkd-2-00", "inter-0-penult-0", "0", "0"),
            _alpha("letkd-2-01", "inter-0-penult-1", "0", "1"),
            _alpha("letkd-2-10", "inter-1-penult-0", "1", "0"),
            _alpha("letkd-2", "inter-1-penult-1", "1", "1"),
        ),
    ),
    "geometry": Analysis(
        "How well does a linear classifier (LDA) separate the classes on the student's pooled intermediate "
        "features, before and after the KD layer?",
        "Table 8",
        "cifar100/rn56-rn20",
        (
            Line("letkd-2-01", "cifar100-gap-lda/{pair}/alpha-0", title="α inter 0, x", feature="x"),
            Line("letkd-2", "cifar100-gap-lda/{pair}/alpha-1-x", title="α inter 1, x", feature="x"),
            Line("letkd-2", "cifar100-gap-lda/{pair}/alpha-1-x-hat", title="α inter 1, x̂", feature="x_hat"),
        ),
        measure=_geometry,
    ),
    "k-inter": Analysis(
        "How many sub-classes per class should the intermediate site have?",
        "Fig. 4",
        "cifar100/rn56-rn20",
        tuple(
            Line("letkd-2", f"cifar100-k-inter/{{pair}}/{K}", () if K == 8 else (f"{K_INTER}={K}",), f"K_inter {K}", float(K))
            for K in (1, 4, 8, 16, 32)
        ),
        x_label="K_inter",
    ),
    "3x3": Analysis(
        "Can the teacher's own 3x3 kernels replace the K-means centres?",
        "Table 3",
        "cifar100/rn56-rn20",
        tuple(Line(method, f"cifar100/{{pair}}/{method}") for method in ("quest", "quest-3x3", "letkd-1", "letkd-1-3x3")),
    ),
    "multi-layer": Analysis(
        "Does K-means supervision at two layers help, with and without KD layers?",
        "Table 4",
        "cifar100/rn56-rn20",
        tuple(
            Line(method, f"cifar100/{{pair}}/{method}") for method in ("quest", "quest-2", "letkd-1", "letkd-1-2", "letkd-2")
        ),
    ),
    "fitnet": Analysis(
        "Does the gain come from the layer's capacity or from its supervision?",
        "Table 10",
        "cifar100/rn110-rn32",
        (
            Line("fitnet", "cifar100-fitnet/{pair}/fitnet"),
            Line("fitnet-layer", "cifar100/{pair}/fitnet-layer"),
            Line("fitnet-letkd-1", "cifar100/{pair}/fitnet-letkd-1"),
        ),
    ),
}


def find_analysis(name: str, *others: str) -> Analysis:
    """An analysis by its name."""
    if name not in ANALYSES:
        raise RecipeError(
            f"unknown analysis {name!r} (nearest: {nearest(name, ANALYSES)}); the analyses are {', '.join([*ANALYSES, *others])}"
        )
    return ANALYSES[name]


def as_grid(analysis: Analysis, pair: str, values: Sequence[Sequence[float]], notes: Sequence[str] = ()) -> Grid:
    """The table: mean ± std over seeds per row, next to the paper's number.

    Args:
        values: for each row, one value per seed, in per cent.
    """
    rows = []
    for line, found in zip(analysis.lines, values, strict=True):
        paper = analysis.paper(line, pair)
        recipe = " ".join([line.method, *(setting.split(".")[-1] for setting in line.settings)])
        title = line.title or _title(line.method)
        rows.append([Cell(title), Cell(recipe), Cell(mean_std(found)), Cell(str(len(found))), Cell(str(paper or NONE))])
    head = ["row", "recipe", "ours, %", "n", "paper, %"]
    texts = [analysis.question, f"The paper's numbers ({analysis.source}) are for {_pair_of_paper(analysis, pair)}."]
    keys = {setting.partition("=")[0] for line in analysis.lines for setting in line.settings}
    texts += [f"{key.split('.')[-1]} is {key}." for key in sorted(keys)]
    return Grid(f"{analysis.source} on {pair}", head, rows, [*texts, *notes])


def _pair_of_paper(analysis: Analysis, pair: str) -> str:
    own = any(paper_result(line.paper.format(pair=pair.rpartition("/")[2])) for line in analysis.lines)
    return pair if own and pair.startswith("cifar100/") else f"{analysis.pair}, another pair, so the scale differs"


def _title(method: str) -> str:
    from letkd.recipes import list_pairs, resolve

    return resolve(list_pairs()[0], method=method).title


def as_chart(analysis: Analysis, pair: str, values: Sequence[Sequence[float]]) -> Chart:
    """The rows as a curve over x, ours and the paper's; on another pair than the paper's, as differences from the first row."""
    x = [line.x for line in analysis.lines if line.x is not None]
    mean = [sum(found) / len(found) if found else None for found in values]
    low, high = ([choose(found) if found else None for found in values] for choose in (min, max))
    theirs = [result.mean if (result := analysis.paper(line, pair)) else None for line in analysis.lines]
    title, y_label = f"{analysis.source}: accuracy by {analysis.x_label}", "test accuracy, %"
    if pair != analysis.pair:
        low, high, mean = (_differences(mean[0], bound) for bound in (low, high, mean))
        theirs = _differences(theirs[0], theirs)
        y_label = f"difference from {analysis.x_label} {x[0]:g}, points"
    series = [Series(f"ours, {pair}", mean, 0, low, high), Series(f"paper, {analysis.pair}", theirs, 1)]
    return Chart("curve", title, analysis.x_label, y_label, x, series)


def _differences(first: float | None, values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or first is None else value - first for value in values]
