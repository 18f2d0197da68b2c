"""The documentation is true: its code runs, its commands and cells exist, and so do the tests that it names."""

import ast
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import letkd
from letkd.cli.main import app, main
from letkd.distiller.student import read_header
from letkd.methods import METHODS
from letkd.recipes import list_pairs, list_rows, resolve
from letkd.search.space import check_keys, parse_ranges

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of every code block, in order."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def commands(page: str) -> list[list[str]]:
    """The words after `letkd` of every command, whoever starts it."""
    texts = [text.replace("\\\n", " ") for kind, _, text in blocks(page) if kind in ("sh", "console")]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    return [words[words.index("letkd") + 1 :] for words in lines if "letkd" in words]


def code_of(command: Callable[[], None]) -> int:
    try:
        command()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def follow(page: str, monkeypatch, *, kinds: tuple[str, ...] = ("python", "sh")) -> dict:
    """Do what a page says, from its first block to its last, in the current folder; returns Python's names."""
    monkeypatch.syspath_prepend(Path.cwd())
    names: dict = {}
    for kind, title, text in blocks(page):
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif kind == "python" and kind in kinds:
            exec(compile(text, page, "exec"), names)
        elif kind == "sh" and kind in kinds:
            for line in text.splitlines():
                monkeypatch.setattr(sys, "argv", shlex.split(line))
                assert code_of(main) == 0, line
    return names


@pytest.mark.slow
def test_your_own_model_and_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    names = follow("own-model-and-data.md", monkeypatch)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    said = capsys.readouterr().out
    for run in ("teacher", "alone", "letkd-1"):
        assert json.loads(Path("runs", run, "result.json").read_text())["last_test"] > 50, run  # one in ten by chance
    assert "digit-3" in said
    assert type(names["model"]).__name__ == "Sequential"
    assert set(names["step"].terms) == {"ce", "kd/penultimate"}
    grafted = names["mixer"].student.blocks[1][2]
    assert isinstance(grafted.kd_penultimate, letkd.KDLayer)
    assert grafted.kd_penultimate.nu.weight.grad is not None


@pytest.mark.slow
def test_foundation_models_as_teachers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "backbone", raising=False)
    names = follow("foundation-models.md", monkeypatch)
    monkeypatch.delitem(sys.modules, "backbone", raising=False)
    assert "--tap penultimate=blocks.2:tokens" in capsys.readouterr().out
    assert set(names["step"].terms) == {"ce", "kd/penultimate"}
    (change,) = read_header("runs/vit/student.safetensors")["changes"]
    assert change["layout"] == "tokens:prefix=1:grid=4x4"
    assert Path("runs/vit/student.pt2").is_file()
    table = next(text for kind, _, text in blocks("foundation-models.md") if kind == "toml")
    Path("mine.toml").write_text(table)
    recipe = resolve(
        "mine.toml", overrides={"data.name": "digits", "student.model": "vgg8", "teacher.model": "backbone.py:vit"}
    )
    assert recipe.teacher.taps == {"penultimate": "blocks.2:tokens:prefix=1:grid=4x4"}


def test_the_first_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = follow("index.md", monkeypatch, kinds=("python",))["model"]
    assert sum(isinstance(module, letkd.KDLayer) for module in model.modules()) == 2
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_augmentation_and_mixing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = follow("augmentation.md", monkeypatch)
    assert names["batch"].lam >= 0.5
    assert torch.isfinite(names["step"].loss)
    recipe = resolve("strong.toml", overrides={"data.name": "digits", "student.model": "resnet8_tiny"})
    assert (recipe.data.augment, recipe.data.mix, recipe.train.label_smoothing) == ("crop+randaugment", "cutmix", 0.1)


def test_the_rows_of_a_file_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    follow("experiments.md", monkeypatch, kinds=())
    assert list_rows("mine.toml") == ["letkd-1", "soft"]
    (command,) = [words for words in commands("experiments.md") if words[0] == "compare"]
    recipes = {row: resolve("mine.toml", method=row) for row in command[command.index("--methods") + 1].split(",")}
    assert recipes["letkd-1"].methods["letkd"]["sites"]["penultimate"]["supervision"]["tau"] == "auto"
    assert (recipes["soft"].methods["kd"]["T"], recipes["kd"].methods["kd"]["T"]) == (8.0, 4.0)
    assert command[command.index("--against") + 1] in recipes
    ranges = [after for words in commands("experiments.md") for word, after in pairwise(words) if word == "--over"]
    check_keys(parse_ranges(ranges), resolve("digits/tiny/letkd-1"))


@pytest.mark.slow
def test_shipping_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = follow("deploy.md", monkeypatch, kinds=("python",))
    assert isinstance(names["again"], torch.nn.Module)
    assert (tmp_path / "student.safetensors").exists()


@pytest.mark.parametrize("page", PAGES)
def test_python_is_python_and_toml_is_toml(page):
    for kind, _, text in blocks(page):
        if kind == "python":
            ast.parse(text)
        elif kind == "toml":
            tomllib.loads(text)


@cache
def verbs() -> dict:
    return typer.main.get_command(app).commands


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    for verb, *words in commands(page):
        assert verb in verbs(), verb
        found = verbs()[verb]
        if hasattr(found, "commands"):
            found, words = found.commands[words[0]], words[1:]
        known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, (verb, words)


def test_commands_are_found():
    assert [page for page in PAGES if commands(page)] == [
        *(
            "deploy.md",
            "distributed.md",
            "evidence.md",
            "experiments.md",
            "faq.md",
            "foundation-models.md",
            "index.md",
            "own-model-and-data.md",
            "security.md",
            "speed.md",
            "training.md",
        )
    ]
    assert ["train", "digits/tiny/ce", "--quick"] in commands("faq.md")  # behind torchrun


@pytest.mark.parametrize("page", PAGES)
def test_cells_and_settings_in_commands_resolve(page):
    for words in commands(page):
        cells = [word for word in words if word.rpartition("/")[0] in list_pairs()]
        settings = [after for word, after in pairwise(words) if word == "--set"]
        for cell in cells:
            resolve(cell, settings=settings)


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_named_exist(page):
    for file, name in TEST.findall((DOCS / page).read_text(encoding="utf-8")):
        path = ROOT / file
        assert path.exists(), file
        if name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_question_has_an_answer_and_a_test():
    parts = re.split(r"^## (\d+)\. (.+)$", (DOCS / "faq.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    numbers, titles, answers = [int(n) for n in parts[::3]], parts[1::3], parts[2::3]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 22
    for title, answer in zip(titles, answers, strict=True):
        assert TEST.search(answer.strip().splitlines()[-1]), title


def test_the_reference_lists_every_public_name():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: letkd\.(\w+)$", page, re.M))
    assert listed == set(letkd.__all__) - {"__version__"} | {"methods"}
    members = re.search(r"members: \[(.*)\]", page)[1].split(", ")
    assert set(members) | listed >= {*letkd.methods.__all__} - {"METHODS", "methods"}
    assert {cls.__name__ for cls in METHODS.values()} <= set(members)


@pytest.mark.parametrize("target", ["other.md", "index.md#nowhere", "other.png", "/absolute.md"])
def test_a_link_that_leads_nowhere_stops_the_build(target, tmp_path):
    """By the settings of the site; theme and plug-ins play no part in it."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    given = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site"), "extra_css": [], "plugins": []}

    def build_with(text: str) -> None:
        page.write_text(text)
        build(load_config(str(ROOT / "mkdocs.yml"), **given, theme="mkdocs", nav=["index.md"], markdown_extensions=[]))

    build_with("# Title\n\n[here](index.md#title)\n")
    with pytest.raises(Abort, match="1 warnings in strict mode"):
        build_with(f"# Title\n\n[there]({target})\n")


def test_nothing_is_fetched_from_elsewhere():
    """Pages, style and settings name no address that a browser would load by itself."""
    sources = [ROOT / "mkdocs.yml", *DOCS.glob("*.css")]
    assert "font: false" in sources[0].read_text()
    for path in sources:
        assert not re.search(r"https?://", path.read_text()), path.name
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(http|<script|<link|<img", (DOCS / page).read_text(encoding="utf-8")), page
