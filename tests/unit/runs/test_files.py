"""Every file of a run folder: read with checks, written without following links, named in one place."""

import ast
import dataclasses
import errno
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import letkd
import letkd.training.finish as finish
import letkd.training.loop as loop
from letkd.distiller.student import FORMAT, save_student
from letkd.errors import CheckpointError, DataError, RunError
from letkd.files import must_be_utf8, read_plain, scrap_name, sweep, write_whole
from letkd.models import create_model
from letkd.recipes import resolve
from letkd.report.charts import Chart, Series, draw
from letkd.report.collect import find_groups
from letkd.report.curves import curves
from letkd.report.opened import RunOpener
from letkd.report.write import write_file, write_report
from letkd.runs.checkpoint import load_trained, save_checkpoint
from letkd.runs.evaluation import Predictions
from letkd.runs.folder import RunFolder
from letkd.runs.grid import Cell, Grid, as_csv, as_latex, as_markdown
from letkd.runs.records import Note, Result
from letkd.runs.results import Row
from letkd.training.trials import compare

SRC = Path(letkd.__file__).parent
SMALL = ["data.fraction=0.05", "data.batch_size=16", "train.epochs=1", "train.steps=1", "student.model=resnet8_tiny"]
RESULT = Result(90.0, 99.0, None, None, None, None, 1000, 1, 2.0)


def a_run(path: Path, log: bytes | None = None) -> RunFolder:
    """A finished run without networks."""
    run = RunFolder(path, resolve("digits/tiny/ce"))
    with run.begin():
        for epoch in (1, 2, 3):
            run.log({"epoch": epoch, "lr": 0.1, "loss": 1.0 / epoch, "ce": 1.0 / epoch, "val_top1": 90.0})
        run.finish(RESULT)
    if log is not None:
        run.log_file.write_bytes(log)
    return run


# ------------------------------------------------------------------------------------------------ readers

GOOD = b'{"epoch": 1, "loss": 1.0, "ce": 1.0}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"epoch": 1e12}',
        b'{"epoch": 1000000000000}',
        b'{"epoch": 2147483647}',
        b'{"epoch": "2"}',
        b'{"epoch": true}',
        b'{"epoch": 1}',
        b'{"epoch": 2, "loss": "low"}',
        b'{"epoch": 2, "loss": [1]}',
        b'{"epoch": 2, "health": 5}',
        b'{"epoch": 2, "health": {"penultimate": 5}}',
        b'{"epoch": 2, "\\ud800": 1.0}',
        b'{"epoch": 2, "lo',
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"epoch": 2, ' + b", ".join(b'"t%d": 1.0' % k for k in range(100)) + b"}",
    ],
    ids=lambda line: line[:30].decode(errors="replace"),
)
def test_a_damaged_log_costs_its_rows_and_a_line_says_so(tmp_path, said, line):
    run = a_run(tmp_path / "run", GOOD + line + b'\n{"epoch": 3, "loss": 0.5, "ce": 0.5}\n')
    (group,) = find_groups([tmp_path])
    assert [row["epoch"] for row in group.runs[0].rows] == [1, 3]
    assert said().count(f"{run.log_file} is damaged: 1 of its 3 rows cannot be read and are skipped") == 1
    chart = next(chart for chart in curves("p", [group]) if chart.key.startswith("loss-"))
    assert list(chart.series[0].y) == [1.0, None, 0.5]


def test_a_resumed_run_keeps_the_place_of_lost_rows(tmp_path):
    run = a_run(tmp_path / "run", GOOD + b"{broken\n")
    run.log({"epoch": 5, "loss": 0.1})
    assert run.log_file.read_bytes().splitlines()[1:] == [b"", b"", b"", b'{"epoch": 5, "loss": 0.1}']
    assert [row["epoch"] for row in run.rows()] == [1, 5]


def test_values_that_no_axis_can_hold_are_gaps(tmp_path):
    a_run(tmp_path / "run", b'{"epoch": 1, "ce": NaN}\n{"epoch": 2, "ce": 1e308}\n{"epoch": 3, "ce": 2.0}\n')
    (group,) = find_groups([tmp_path])
    chart = next(chart for chart in curves("p", [group]) if chart.key.startswith("loss-"))
    assert list(chart.series[0].y) == [None, None, 2.0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "recipe.toml", "note.json", "env.json"])
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path, name, said):
    run = a_run(tmp_path / "run")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    folder = RunFolder(run.path)
    if name == "metrics.jsonl":
        assert folder.rows() == []
        assert "cannot be read (it is not a regular file)" in said()
    elif name == "env.json":
        with RunFolder(run.path, run.recipe).begin():
            assert "env.json is damaged" in said()
    else:
        with pytest.raises(RunError, match="not a regular file"):
            _ = {"result.json": lambda: folder.result, "recipe.toml": lambda: folder.recipe, "note.json": lambda: folder.note}[
                name
            ]()
    with pytest.raises(OSError, match="at most 10 are allowed"):
        read_plain(SRC / "files.py", limit=10)


@pytest.mark.parametrize(
    "content",
    ['{"last_test": "90"}', "[]", '{"last_test": NaN}', "\x00", json.dumps({**RESULT.__dict__, "last_test": 1e9})],
)
def test_a_damaged_result_counts_as_none_in_the_report_and_is_named(tmp_path, said, content):
    run = a_run(tmp_path / "run")
    (run.path / "result.json").write_text(content)
    with pytest.raises(RunError, match=r"result\.json is damaged \(.*\); remove this file; `letkd train` then computes"):
        _ = RunFolder(run.path).result
    assert find_groups([tmp_path])[0].results == []
    assert "result.json is damaged" in said()


def test_one_damaged_recipe_costs_its_run_and_not_the_report(tmp_path, said):
    a_run(tmp_path / "a")
    bad = a_run(tmp_path / "b")
    bad.recipe_file.write_bytes(b"title = \xff")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "note.json").write_text('{"title": 5}')
    (group,) = find_groups([tmp_path])
    assert [run.path.name for run in group.runs] == ["a"]
    lines = said()
    assert f"{bad.recipe_file} is damaged" in lines
    assert "note.json is damaged" in lines
    with pytest.raises(RunError, match=r"no run to report on: .*recipe\.toml is damaged"):
        find_groups([tmp_path / "b"])


def test_notes_round_trip_and_vanish(tmp_path):
    run, note = RunFolder(tmp_path / "kd"), Note("digits/tiny", "kd", "KD", "failed")
    run.keep_note(note)
    assert run.note == note
    run.keep_note(Note("digits/tiny", "kd", "KD", ""))
    assert run.note is None


def test_predictions_carry_a_checksum_and_fit_their_classes(tmp_path):
    path = tmp_path / "predictions.safetensors"
    Predictions(torch.tensor([0, 2]), torch.tensor([1, 2])).save(path)
    assert Predictions.load(path, 3).labels.tolist() == [1, 2]
    with pytest.raises(RunError, match="does not hold a class below 2 for every image"):
        Predictions.load(path, 2)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RunError, match="its checksum differs"):
        Predictions.load(path, 3)
    for tensors in ({"predicted": torch.zeros(2)}, {"predicted": torch.zeros(2), "labels": torch.zeros(3)}):
        save_file(tensors, path)
        with pytest.raises(RunError, match="is damaged"):
            Predictions.load(path, 3)


def test_a_checkpoint_that_is_damaged_or_not_finite_is_not_looked_into(tmp_path, monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    save_checkpoint(tmp_path, module, optimizer, {"epoch": 1})
    load_trained(module, tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
        load_trained(module, tmp_path)
    module[1].running_mean.fill_(float("nan"))
    path.unlink()
    monkeypatch.setattr("letkd.runs.checkpoint.check_finite", lambda *args: None)  # as others might write it
    save_checkpoint(tmp_path, module, optimizer, {"epoch": 1})
    with pytest.raises(CheckpointError, match=r"holds NaN or infinity in '1\.running_mean'"):
        load_trained(module, tmp_path)


# ------------------------------------------------------------------------------------------------ links, locks, scraps


@pytest.fixture
def canary(tmp_path):
    """A folder of somebody else, and a promise that nothing in it changes."""
    home = tmp_path / "home"
    home.mkdir()
    names = [
        ".bashrc",
        "checkpoint.safetensors",
        "table.md",
        scrap_name("thesis"),
        "note.json",
        "penultimate.kmeans.safetensors",
    ]
    for name in names:
        (home / name).write_text("mine")
        os.utime(home / name, (1, 1))
    yield home
    assert {path.name: path.read_text() for path in home.iterdir()} == dict.fromkeys(names, "mine")


def test_a_lock_that_is_a_link_is_refused(tmp_path, canary):
    run = a_run(tmp_path / "run")
    for make in (os.symlink, os.link):
        (run.path / ".lock").unlink()
        make(canary / ".bashrc", run.path / ".lock")
        with pytest.raises(RunError, match=r"\.lock cannot be used as a lock: it is (a link|not a regular file)"), run.begin():
            pass
    (run.path / ".lock").unlink()
    os.mkfifo(run.path / ".lock")
    with pytest.raises(RunError, match="cannot be used as a lock"), run.begin():
        pass


@pytest.mark.parametrize("name", ["last", "supervision", "tensorboard", "supervision/views"])
def test_training_does_not_write_or_sweep_through_a_link(tmp_path, canary, name):
    recipe = resolve("digits/tiny/ce", settings=SMALL)
    with RunFolder(tmp_path / "run", recipe).begin():
        pass
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(canary)
    with pytest.raises(RunError, match=f"{name} is a link to .*home, and nothing is written through links"):
        loop.train(recipe, tmp_path / "run")


def test_a_report_and_a_comparison_do_not_write_through_links(tmp_path, canary):
    run = a_run(tmp_path / "run")
    (run.path / "report").symlink_to(canary)
    with pytest.raises(RunError, match=r"report is a link to .*home"):
        write_report([run.path], run.path)
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "ce").symlink_to(canary)
    with pytest.raises(RunError, match=r"ce is a link to .*home"):
        compare("digits/tiny", ["ce"], tmp_path / "compared", trials=1, settings=SMALL)


def test_a_file_that_is_a_link_is_replaced_and_not_followed(tmp_path, canary):
    (tmp_path / "x").symlink_to(canary / ".bashrc")
    write_whole(tmp_path / "x", b"ours")
    assert not (tmp_path / "x").is_symlink()


def test_only_our_own_old_scraps_are_swept(tmp_path, canary):
    folder = tmp_path / "folder"
    half = folder / scrap_name("cifar-100")
    (half / "inside").mkdir(parents=True)
    (half / "inside" / "file").write_text("half")
    old, fresh, other = (folder / name for name in (scrap_name("a"), scrap_name("b"), ".notes.tmp"))
    deep = folder / "sub" / scrap_name("c")
    deep.parent.mkdir()
    for path in (old, fresh, other, deep):
        path.write_text("x")
    (folder / scrap_name("link")).symlink_to(canary)
    for path in (old, other, deep, half / "inside" / "file", half / "inside", half):
        os.utime(path, (1, 1))
    sweep(folder, name="z")
    assert old.exists()
    sweep(folder)
    assert [path.exists() for path in (old, fresh, other, deep, half)] == [False, True, True, True, False]
    sweep(folder, below=True)
    assert not deep.exists()
    sweep(folder, older=0)
    assert not fresh.exists()
    (tmp_path / "linked").symlink_to(canary)
    sweep(tmp_path / "linked", older=0)


def test_a_half_unpacked_folder_that_is_still_growing_is_left_alone(tmp_path):
    half = tmp_path / scrap_name("data")
    half.mkdir()
    (half / "file").write_text("now")
    os.utime(half, (1, 1))
    sweep(tmp_path)
    assert half.exists()
    os.utime(half / "file", (time.time() - 4000,) * 2)
    sweep(tmp_path)
    assert not half.exists()


@pytest.mark.slow
def test_the_report_sweeps_what_a_killed_one_left(tmp_path, monkeypatch):
    a_run(tmp_path / "run")
    scraps = [tmp_path / scrap_name("report.html"), tmp_path / "report" / scrap_name("table.md")]
    scraps[1].parent.mkdir()
    for scrap in scraps:
        scrap.write_text("half")
        os.utime(scrap, (1, 1))
    monkeypatch.setattr("letkd.report.write.write_file", lambda path, content: None)
    write_report([tmp_path / "run"], tmp_path)
    assert not any(scrap.exists() for scrap in scraps)


# ------------------------------------------------------------------------------------------------ while a run is under way


def test_the_recipe_is_compared_again_under_the_lock(tmp_path):
    one = RunFolder(tmp_path / "run", resolve("digits/tiny/ce"))
    two = RunFolder(tmp_path / "run", resolve("digits/tiny/ce", settings=["optim.lr=0.9"]))
    with one.begin():
        one.log({"epoch": 1})
    with pytest.raises(RunError, match=r"holds another run \(it differs in optim.lr\)"), two.begin():
        pass


@pytest.mark.parametrize("moment", ["Tally", "sum_tables", "finish"])  # before an epoch, after it, at the end
def test_a_run_whose_folder_is_removed_does_not_end_as_finished(tmp_path, monkeypatch, moment):
    recipe, real = resolve("digits/tiny/ce", settings=SMALL), getattr(loop, moment)

    def gone(*values):
        if (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return real(*values)

    monkeypatch.setattr(loop, moment, gone)
    with pytest.raises(RunError, match="run was removed or replaced during training"):
        loop.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing is left in the way of the next start"


def test_an_empty_test_split_is_told_before_anything_is_written(tmp_path, monkeypatch):
    read = loop.read_data

    def without_test(recipe):
        data = read(recipe)
        return dataclasses.replace(data, test=data.test.subset(torch.arange(0)))

    monkeypatch.setattr(loop, "read_data", without_test)
    with pytest.raises(DataError, match="digits has no test images"):
        loop.train(resolve("digits/tiny/ce", settings=SMALL), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_student_is_there_before_it_is_evaluated(tmp_path, monkeypatch):
    score = finish.score

    def fail_on_test(*values, description, **more):
        if "test" in description:
            raise KeyboardInterrupt
        return score(*values, description=description, **more)

    monkeypatch.setattr(finish, "score", fail_on_test)
    with pytest.raises(KeyboardInterrupt):
        loop.train(resolve("digits/tiny/ce", settings=SMALL), tmp_path / "run")
    assert letkd.load_student(tmp_path / "run" / "student.safetensors")


# ------------------------------------------------------------------------------------------------ text is never markup

NAME = "cost_$5_to_$10"


@pytest.mark.slow
def test_names_in_figures_are_text(tmp_path):
    series = [Series(NAME, [1.0, 2.0]), Series("$\\frac$", [2.0, 1.0])]
    write_file(tmp_path / "lines", draw(Chart("k", NAME, "x", "$_$", [1, 2], series, log_y=True)))
    write_file(tmp_path / "dots", draw(Chart("k", NAME, "x", "y", [NAME, "$^^$"], series, kind="dots")))
    assert (tmp_path / "dots.svg").stat().st_size > 1000
    figure = draw(Chart("k", "t", "x", "y", [1, 2], [Series("a", [0.001, 1.0])], log_y=True))
    write_file(tmp_path / "log", figure)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert not any("$" in label for label in labels), "powers of ten are plain, too"


def test_names_in_tables_are_text():
    from letkd.report.results_table import as_markdown as rows_as_markdown

    grid = Grid(
        "# t", ["x"], [[Cell(NAME)], [Cell("[1cm] a")], [Cell("*b")]], ["- a list", "1. one", "> quoted", "98.6 % stays"]
    )
    markdown, latex = as_markdown(grid), as_latex(grid)
    assert r"cost\_\$5\_to\_\$10" in markdown
    assert [line for line in markdown.splitlines() if line][-4:] == [r"\- a list", r"1\. one", r"\> quoted", "98.6 % stays"]
    assert not re.search(r"(\\\\|rule)\s*[\[*]", latex), "an option of the line before"
    assert as_csv(["a"], [["\n=1"]]).splitlines()[1] == "\"'"
    assert rows_as_markdown([Row("a|b", [RESULT])]).splitlines()[2].startswith(r"| a\|b | 90.00")


def test_the_report_advises_an_option_that_it_has(tmp_path):
    run = a_run(tmp_path / "run")
    save_student(create_model("resnet8_tiny", num_classes=10), run.student, model="my.py:net", num_classes=10)
    opened = RunOpener()
    (group,) = find_groups([run.path])
    assert opened.attempt("features", lambda: opened.student(group.runs[0])) is None
    assert opened.missing[0].endswith("code named in a file is not run unless you trust it and add --trust")
    run.student.write_bytes(b"no student")
    assert opened.attempt("features", lambda: opened.student(group.runs[0])) is None
    assert not any("--student " in sentence for sentence in opened.missing)


def test_class_names_of_any_kind_reach_the_page(tmp_path):
    run = a_run(tmp_path / "run")
    header = {"format": FORMAT, "model": "resnet8_tiny", "num_classes": 2, "changes": [], "classes": ["?", NAME]}
    save_file({"w": torch.zeros(1)}, run.student, metadata={"letkd": json.dumps(header)})
    (group,) = find_groups([run.path])
    assert RunOpener().classes(group.runs[0]) == ("?", NAME)
    for wrong in (["\ud800", NAME], 5):
        header["classes"] = wrong
        save_file({"w": torch.zeros(1)}, run.student, metadata={"letkd": json.dumps(header)})
        with pytest.raises(CheckpointError, match="its header is wrong at classes"):
            RunOpener().classes(group.runs[0])


# ------------------------------------------------------------------------------------------------ names and paths


@pytest.mark.parametrize("verb", ["eval", "report", "export", "train"])
@pytest.mark.parametrize("where", ["run", "out"])
def test_a_path_that_is_not_utf8_is_one_sentence(letkd, tmp_path, verb, where):
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    run = a_run(tmp_path / "run").path
    words = {"eval": [], "report": [], "export": ["--to", "onnx"], "train": ["--out", bad]}[verb]
    if where == "run":
        os.makedirs(bad)
        words = [verb, "digits/tiny/ce" if verb == "train" else bad, *words]
    elif verb == "eval":
        words = [verb, bad]  # has no --out; a file instead of a folder
    else:
        target = f"{bad}.onnx" if verb == "export" else bad
        words = [verb, "digits/tiny/ce" if verb == "train" else run, *words, *(["--out", target] if verb != "train" else [])]
    if (verb, where) == ("export", "out"):
        save_student(
            create_model("resnet8_tiny", num_classes=10), run / "student.safetensors", model="resnet8_tiny", num_classes=10
        )
    code, _, err = letkd(*words)
    assert code == 2, err
    assert r"\xff" in err
    assert "is not UTF-8, so no recipe or report can name it; rename it" in err
    assert "unexpected error" not in err


def test_must_be_utf8():
    assert must_be_utf8(Path("ä")) == Path("ä")


NAMES = re.compile(
    r"recipe\.toml|metrics\.jsonl|result\.json|predictions\.safetensors|env\.json|note\.json|student\.safetensors|"
    r"best_on_validation\.safetensors|checkpoint\.safetensors|previous\.safetensors"
)


def literals(tree: ast.AST):
    """Strings of a program that are neither docstrings nor help texts of the command line."""
    quiet = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            quiet.add(node.body[0].value)
        if isinstance(node, ast.keyword) and node.arg == "help":
            quiet.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in quiet:
            yield node


@pytest.mark.slow
def test_no_file_of_a_run_folder_is_named_outside_its_class():
    for path in sorted(SRC.rglob("*.py")):
        if path.parent.name == "runs":
            continue
        tree = ast.parse(path.read_text())
        found = [f"{path.name}:{node.lineno}: {node.value!r}" for node in literals(tree) if NAMES.search(node.value)]
        if path == SRC / "distiller" / "student.py":
            found.remove(next(name for name in found if name.endswith("'student.safetensors'")))  # its own name, STUDENT
        parts = [node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
        found += [
            f"{path.name}:{part.lineno}: {part.value!r}"
            for part in parts
            if isinstance(part, ast.Constant) and part.value in ("last", "supervision", "tensorboard", ".lock")
        ]
        assert not found


def test_a_full_disk_is_still_told(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="there is no space left"):
        write_whole(tmp_path / "x", b"x")
    assert not list(tmp_path.iterdir())
