"""`letkd report` and what it leaves behind: files for papers, and sentences where something is not at hand."""

import csv
import json
import shutil

import pytest
import torch

from letkd.cli.main import main
from letkd.distiller.student import load_student
from letkd.models.cost import macs
from letkd.report.collect import find_groups
from letkd.report.opened import RunOpener


def test_it_writes_the_page_and_files_for_papers(runs, report):
    assert (report / "said.txt").read_text().strip() == f"report: {report / 'report.html'}"
    (pair,) = {group.pair for group in find_groups([runs])}
    begin = pair.replace("/", "-")
    expected = {"table.md", "table.tex", "table.csv", f"{begin}-classes.csv", f"{begin}-confusions.csv"}
    names = ("val", "train", "lr", "losses", "health-penultimate", "classes", "features", "correlations")
    slug = "-".join(begin.replace("_", " ").replace("-", " ").split())
    knowledge = (
        f"{slug}-{site}"
        for site in ("quest-knowledge-penultimate", "letkd-2-knowledge-penultimate", "letkd-2-knowledge-intermediate")
    )
    expected |= {f"{name}.{kind}" for name in (*(f"{begin}-{name}" for name in names), *knowledge) for kind in ("png", "svg")}
    assert {path.name for path in (report / "report").iterdir()} == expected
    rows = {row["method"]: row for row in csv.DictReader((report / "report" / "table.csv").open())}
    student = load_student(runs / "letkd-2" / "seed-0" / "student.safetensors")
    assert int(rows["letkd-2"]["macs"]) == macs(student, torch.zeros(1, 3, 32, 32)) > int(rows["ce"]["macs"])
    results = [json.loads((runs / "letkd-2" / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    assert float(rows["letkd-2"]["last_test_mean"]) == pytest.approx(sum(result["last_test"] for result in results) / 2)
    classes = list(csv.DictReader((report / "report" / f"{begin}-classes.csv").open()))
    mean = sum(float(row["letKD-2"]) for row in classes) / 10
    assert mean == pytest.approx(float(rows["letkd-2"]["last_test_mean"])), "every class has as many test images"
    page = (report / "report.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", ""), "nothing is fetched"


def test_what_is_not_at_hand_is_left_out_with_a_sentence(runs, tmp_path):
    shutil.copytree(runs / "letkd-2" / "seed-0", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "last")
    (group,) = find_groups([tmp_path / "run"])
    opened = RunOpener()
    assert opened.attempt("knowledge", lambda: opened.distiller(group.runs[0])) is None
    assert opened.missing == [
        f"knowledge left out: {tmp_path / 'run'} has no checkpoint in last/, which contains the templates"
    ]


def test_macs_are_those_of_the_runs_images(runs, monkeypatch):
    (run, *_) = next(group for group in find_groups([runs]) if group.method == "ce").runs
    opened, by_size = RunOpener(), []
    student = opened.student(run)
    for size in ((3, *opened.data(run).image_size), 32, (3, 64, 64)):
        student.input_size = size
        monkeypatch.setattr(opened, "student", lambda run: student)
        by_size.append(opened.macs(run))
    assert by_size[0] == by_size[1] == by_size[2], "the images of the run count, not the size that the network is made for"


def test_code_that_a_recipe_names_is_not_run(runs, tmp_path):
    shutil.copytree(runs / "letkd-2" / "seed-0", tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.toml"
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\ndef net(num_classes): pass\n")
    recipe.write_text(recipe.read_text().replace('model = "resnet8_tiny"', f'model = "{tmp_path}/evil.py:net"'))
    (group,) = find_groups([tmp_path / "run"])
    opened = RunOpener()
    for open_it in (opened.distiller, opened.teacher):
        assert opened.attempt("knowledge", lambda open_it=open_it: open_it(group.runs[0])) is None
    assert "not in the zoo; code named in a file is not run unless you trust it and add --trust" in opened.missing[0]


def test_a_folder_without_runs_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["letkd", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "contains no run" in capsys.readouterr().err
