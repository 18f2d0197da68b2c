"""The README is true: its Python runs, its commands exist, its table is the demo's."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import letkd
from letkd.cli.demo import METHODS, UNLABELLED
from letkd.models import save_weights
from letkd.recipes import list_pairs, resolve
from letkd.report.results_table import COLUMNS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if kind == language]


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_weights(letkd.create_model("resnet56", num_classes=100), "resnet56.safetensors")
    y = torch.arange(100)
    train_loader = [(torch.randn(50, 3, 32, 32), y[:50]), (torch.randn(50, 3, 32, 32), y[50:])]
    names = {"train_loader": train_loader}
    first, own = blocks("python")
    exec(first, names)
    model, student = names["model"], names["student"].eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), student(x))  # the layer as the paper writes it, and fused
    assert sum(parameter.numel() for parameter in model.parameters()) == 914_808
    exec(own, names)
    step = names["distiller"].fit(train_loader)(train_loader[0])
    step.loss.backward()
    assert set(step.terms) == {"ce", "kd/penultimate"}


def test_the_first_screen_has_the_two_commands():
    screen = "\n".join(README.splitlines()[:15])
    assert "make demo" in screen
    assert "make test" in screen
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_commands_exist(capsys):
    commands = [
        shlex.split(line, comments=True) for block in blocks("") for line in block.splitlines() if line.startswith("letkd ")
    ]
    assert {"train", "compare", "report", "export", "predict"} <= {command[1] for command in commands}
    for _, verb, *arguments in commands:
        if verb in ("train", "fit", "compare", "show"):
            resolve(arguments[0])
        from letkd.cli.main import app

        for option in [word for word in arguments if word.startswith("--")]:
            with pytest.raises(SystemExit):
                app([verb, *arguments[: verb == "data"], "--help"])
            assert option in capsys.readouterr().out


def test_cells_named_in_the_text_resolve():
    cells = re.findall(r"\b((?:digits|cifar100)/[\w-]+/[\w-]+)", README)
    assert len(cells) >= 2
    for cell in cells:
        resolve(cell)
    assert {"digits/tiny", "cifar100/rn56-rn20"} <= set(list_pairs())


def test_the_results_are_the_demos():
    table = re.search(r"<!-- demo table -->\n(.*)<!-- end of demo table -->", README, re.S)[1].strip().splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == list(COLUMNS)
    titles = ["Teacher", *(resolve("digits/tiny", method=method).title for method in METHODS), UNLABELLED]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[0] for row in rows] == titles
    for row in rows[1:]:
        assert re.fullmatch(r"\d\d\.\d\d ± \d+\.\d\d", row[1])
        assert row[2] == "3"
    student = letkd.create_model("resnet14_tiny", num_classes=10)
    assert rows[1][4] == f"{sum(parameter.numel() for parameter in student.parameters()):,}"
