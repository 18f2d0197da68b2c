"""docs/paper.md and the tags in the source say the same: every equation and algorithm is found from the paper, and from the code."""

import ast
import re
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from letkd.methods import METHODS
from letkd.models import list_models
from letkd.recipes import resolve
from tests.support.source import CODE, ROOT, SETTING, SOURCE, TEST, definitions, missing, text_of, with_setting

PAGE = ROOT / "docs" / "paper.md"

# What the paper numbers: by LaTeX's counters, three sections of equations and the appendix.
EQUATIONS = {"(3.1)", "(3.2)", "(4.1)", "(4.2)", "(4.3)", *(f"(A.{k})" for k in range(1, 8))}
PARTS = {"Alg. 1, offline", "Alg. 1, online", "Alg. 2, offline", "Alg. 2, online", "Alg. 3"}
HEADINGS = ("Without K-means", "Formulation of 1x1 convolution", "Heterogeneous distillation cases", "Implementation Details")
TABLES, FIGURES = range(1, 11), range(1, 6)

TAG = r"(?:\((?:\d|A)\.\d+\)|Alg\. \d(?:, (?:offline|online))?|section \d(?:\.\d)*|supplement \d(?:\.\d)*)"
COMMENT = re.compile(rf"# (?P<tags>{TAG}(?:; {TAG})*)(?:: \S.*)?")
CELL = re.compile(r"`([a-z0-9]+/[a-z0-9-]+/[a-z0-9-]+)`")


def table_under(heading: str, page: Path = PAGE) -> list[list[str]]:
    """The cells of every row, without the head, of the table under a heading."""
    part = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text_of(page), re.M | re.S)
    assert part, f"{page.name} has no heading {heading!r}"
    lines = [line for line in part[1].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    width = lines[0].count("|") - 1
    assert rows
    assert all(len(row) == width for row in rows), [row[0] for row in rows if len(row) != width]
    return rows


INDEX = "From the paper to its lines and tests"
ARGUED = "In the paper, but not computed here"


def comments() -> list[tuple[Path, int, str]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            found += [(path, token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return found


def owner(path: Path, line: int) -> str:
    """The innermost function or class that a line stands in."""
    around = [(node.lineno, name) for name, node in definitions(path).items() if node.lineno <= line <= node.end_lineno]
    assert around, f"{path.name}:{line} is tagged outside of any function"
    return f"{path.relative_to(SOURCE).as_posix()}: {max(around)[1]}"


def tags_in_source() -> dict[str, set[str]]:
    """tag -> the functions that have a line with it."""
    found = defaultdict(set)
    for path, line, comment in comments():
        if match := COMMENT.fullmatch(comment):
            for tag in match["tags"].split("; "):
                found[tag].add(owner(path, line))
    return dict(found)


def first_tags(cell: str) -> list[str]:
    return re.findall(rf"`({TAG})`", cell)


def test_a_comment_that_names_a_place_of_the_paper_begins_with_its_tag():
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}: {comment}"
        for path, line, comment in comments()
        if re.search(TAG, comment) and not COMMENT.fullmatch(comment)
    ]
    assert not wrong


def test_every_tag_is_in_the_index_with_its_functions_and_every_entry_is_in_the_source():
    index = defaultdict(set)
    for row in table_under(INDEX):
        (tag,) = first_tags(row[0])
        index[tag] |= {f"{file}: {name}" for file, name in CODE.findall(row[2])}
    assert dict(index) == tags_in_source()


def test_every_numbered_equation_is_listed_once():
    computed = [tag for row in table_under(INDEX) for tag in first_tags(row[0])]
    argued = [tag for row in table_under(ARGUED) for tag in first_tags(row[0])]
    listed = [tag for tag in computed + argued if tag.startswith("(")]
    assert sorted(listed) == sorted(EQUATIONS)
    assert not set(argued) & tags_in_source().keys()


def test_every_part_of_every_algorithm_is_listed_once():
    listed = [tag for row in table_under(INDEX) for tag in first_tags(row[0]) if tag.startswith("Alg")]
    assert sorted(listed) == sorted(PARTS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_paragraphs_that_define_something_are_listed(heading):
    assert sum(f'"{heading}"' in row[1] for row in table_under(INDEX)) == 1


def test_every_entry_names_code_and_a_test():
    for row in table_under(INDEX):
        assert CODE.search(row[2]), row
        assert TEST.search(row[3]), row


def test_the_code_and_the_tests_named_exist():
    assert not missing(PAGE)


def test_every_code_and_test_reference_is_written_so_that_it_is_checked():
    """A slip in the form would hide a reference from the test above."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(PAGE), flags=re.S))
    unchecked = [
        span
        for span in spans
        if (".py:" in span or ".toml:" in span) and not (CODE.fullmatch(f"`{span}`") or TEST.fullmatch(f"`{span}`"))
    ]
    assert not unchecked
    files = [span for span in spans if re.fullmatch(r"[\w/-]+\.py", span)]
    assert files
    assert all((SOURCE / file).exists() or (ROOT / file).exists() for file in files)


def test_the_names_stand_where_the_table_says():
    for symbol, names, _, where in table_under("Names"):
        places = CODE.findall(where)
        assert places, symbol
        nodes = [node for file, name in places for node in ast.walk(definitions(SOURCE / file)[name])]
        found = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name")}
        found |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        named = re.findall(r"`(\w+)`", names)
        assert named, symbol
        assert set(named) <= found, symbol


def test_every_table_and_figure_is_accounted_for():
    part = re.search(r"^## Figures and tables$(.*)", text_of(PAGE), re.M | re.S)[1]
    part = re.sub(r"In the supplement printed.*?\. ", "", " ".join(part.split()))  # other numbers for the same
    named = re.findall(r"(Tab|Fig)(?:les?|\.|ures)((?: \d+| and)+)", part)
    told = {(kind, int(n)) for kind, numbers in named for n in re.findall(r"\d+", numbers)}
    assert told == {("Tab", n) for n in TABLES} | {("Fig", n) for n in FIGURES}


def test_the_cells_and_settings_named_can_be_run():
    assert CELL.findall(text_of(PAGE))
    for cell in CELL.findall(text_of(PAGE)):
        recipe = resolve(cell)
        for name, table in recipe.methods.items():
            METHODS[name].from_recipe(table)
    assert SETTING.findall(text_of(PAGE))
    for method, setting in SETTING.findall(text_of(PAGE)):
        _, value, before = with_setting(setting, method or "letkd-2")
        assert value == tomllib.loads(f"value = {setting.partition(' = ')[2]}")["value"] != before


def test_the_zoo_has_the_networks_named():
    (named,) = re.findall(r"^The zoo has every network of these tables\.(.*?)\Z", text_of(PAGE), re.M | re.S)
    names = re.findall(r"`(\w+)`", named)
    assert {"wrn_40_2", "resnet50_cifar"} <= set(names) <= set(list_models())


COLUMNS = {"cifar100": "Tables 1 and 5", "imagenet": "Tables 2 and 6", "tiny-imagenet": "Table 7"}


@pytest.mark.parametrize("data", COLUMNS)
def test_the_columns_named_are_those_with_a_recipe(data):
    (present,) = (
        re.search("columns (.*?)[;:]", row[2])[1].split(", ")
        for row in table_under("Figures and tables")
        if row[0].startswith(COLUMNS[data])
    )
    ablations = {"rn83-rn29"}  # Table 3
    recipes = {path.stem for path in (SOURCE / "recipes" / "pairs" / data).glob("*.toml")} - ablations
    assert {column.lower() for column in present} == recipes
    assert len(present) == {"cifar100": 10, "imagenet": 2, "tiny-imagenet": 5}[data]
