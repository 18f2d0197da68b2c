"""Methods side by side: shared teacher and fits, failures that do not stop the rest, phases."""

import json
import multiprocessing
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import letkd.training.loop as loop
import letkd.training.state as state
import letkd.training.trials as trials
from letkd.cli.compare import show
from letkd.errors import CheckpointError, NonFiniteError, RecipeError, RunError, UnsupportedPair
from letkd.methods import KD, METHODS
from letkd.models import create_model, save_weights
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.recipes.schedule import phase_at
from letkd.runs.folder import RunFolder
from letkd.training.launchers import Local
from letkd.training.launchers.tasks import Outcome
from letkd.training.trials import Variant, compare
from tests.support.runs import a_run

SMALL = ["train.epochs=1", "data.fraction=0.05", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]


NETS = """
from torch import nn

def network(d, num_classes):
    body = nn.Sequential(nn.Conv2d(3, d, 3, stride=4), nn.BatchNorm2d(d), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, num_classes))

def large(num_classes):
    return network(16, num_classes)

def small(num_classes):
    return network(4, num_classes)
"""


class Refuses(KD):
    name = "refuses"

    def build(self, student, teacher):
        raise UnsupportedPair("the moon is in the wrong house")


class Breaks(KD):
    name = "breaks"

    def terms(self, view):
        raise RuntimeError("broken on purpose\nand at length")


@pytest.fixture
def recipes(monkeypatch):
    """Two more methods: one that refuses the pair and one that breaks in its first step."""
    monkeypatch.setitem(METHODS._items, "refuses", Refuses)
    monkeypatch.setitem(METHODS._items, "breaks", Breaks)

    def with_more(pair, *, method=None, **given):
        if method in ("refuses", "breaks"):
            recipe = resolve(pair, method="kd", **given)
            return recipe.model_copy(update={"title": method, "methods": {method: {}}, "weights": {"ce": 1.0}})
        return resolve(pair, method=method, **given)

    monkeypatch.setattr(trials, "resolve", with_more)
    monkeypatch.setattr(trials, "resolve_with_sources", lambda pair, **given: (with_more(pair, **given), {}))


def test_one_failing_method_does_not_stop_the_rest(recipes, tmp_path):
    rows = compare("digits/tiny", ["refuses", "kd", "breaks", "quest", "letkd-1"], tmp_path, trials=1, settings=SMALL)
    by_title = {row.title: row for row in rows}
    assert list(by_title) == ["Teacher", "refuses", "KD", "breaks", "QUEST", "letKD-1"]
    assert by_title["refuses"].note == "does not support this pair: the moon is in the wrong house"
    assert by_title["breaks"].note == "failed: RuntimeError: broken on purpose"
    assert [len(row.results) for row in rows] == [1, 0, 1, 0, 1, 1]
    assert len(list((tmp_path / "supervision").iterdir())) == 1, "QUEST and letKD-1 share their K-means"


def test_any_error_of_a_method_ends_its_row_alone_and_finished_seeds_count(recipes, tmp_path, monkeypatch):
    def terms(self, view):
        raise AttributeError("no attribute 'men'")

    monkeypatch.setattr(Breaks, "terms", terms)
    train = trials.train

    def failing(recipe, *args, **options):
        if recipe.title == "KD" and recipe.train.seed == 1:
            raise NonFiniteError("the loss is nan")
        return train(recipe, *args, **options)

    monkeypatch.setattr(trials, "train", failing)
    _, breaks, kd = compare("digits/tiny", ["breaks", "kd"], tmp_path, trials=2, settings=SMALL)
    assert breaks.note == "failed: AttributeError: no attribute 'men'"
    assert (kd.note, kd.seeds, len(kd.results)) == ("failed: NonFiniteError: the loss is nan", [0], 1)


def test_rows_have_their_own_teachers_and_titles(tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        save_weights(create_model("resnet8_tiny", num_classes=10), tmp_path / f"{seed}.safetensors")
    file = tmp_path / "mine.toml"
    file.write_text(
        f"""
        data = {{ name = "digits", fraction = 0.05 }}
        teacher = {{ model = "resnet8_tiny", weights = "{tmp_path}/0.safetensors" }}
        student.model = "resnet8_tiny"
        train.epochs = 1
        [rows]
        kd = {{}}
        other = {{ like = "kd", teacher.weights = "{tmp_path}/1.safetensors" }}
        """
    )
    rows = compare(str(file), ["kd", "other"], tmp_path / "runs", trials=1)
    assert [row.title for row in rows] == ["KD (kd)", "KD (other)"]
    teachers = [json.loads((tmp_path / f"runs/{row}/seed-0/inputs.json").read_text())["teacher"] for row in ("kd", "other")]
    assert teachers[0] != teachers[1]
    compare(str(file), ["kd", "other"], tmp_path / "same", trials=1, teacher_weights=tmp_path / "1.safetensors")
    again = [json.loads((tmp_path / f"same/{row}/seed-0/inputs.json").read_text())["teacher"] for row in ("kd", "other")]
    assert again == [teachers[1]] * 2


def test_a_row_for_the_teacher_is_the_teacher_of_the_others(letkd, tmp_path):
    small = [part for text in SMALL for part in ("--set", text)]
    code, _, err = letkd("compare", "digits/tiny", "--methods", "teacher,ce,kd", "--trials", 1, *small, "--out", "runs")
    assert code == 0, err
    table = (tmp_path / "runs" / "table.md").read_text()
    assert table.count("| Teacher |") == 1
    assert "Δ to Student" in table
    assert not (tmp_path / "runs" / "teacher" / "seed-0").exists()


def test_a_failed_row_is_an_error_after_the_table(recipes, tmp_path, capsys):
    with pytest.raises(RunError, match=r"^1 of 3 rows failed \(breaks\); to retry them, run the same command again$"):
        show("digits/tiny", ["refuses", "breaks"], tmp_path, trials=1, settings=SMALL, teacher_weights=None, title="two")
    assert "breaks failed: RuntimeError: broken on purpose" in (tmp_path / "table.md").read_text()
    captions = capsys.readouterr().out.splitlines()
    assert any(line.startswith("breaks failed: ") for line in captions), "each note starts a line"


def test_a_damaged_teacher_is_refused_before_any_work(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="damaged or not a weights file"):
        compare("digits/tiny", ["ce", "kd"], tmp_path / "runs", trials=1, teacher_weights=tmp_path / "bad.safetensors")
    assert not (tmp_path / "runs").exists()


def test_a_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    first = compare("digits/tiny", ["ce", "kd"], tmp_path, trials=1, settings=SMALL)
    trained = []
    build = loop.build_distiller
    monkeypatch.setattr(loop, "build_distiller", lambda *args: (trained.append(1), build(*args))[1])
    again = compare("digits/tiny", ["ce", "kd", "quest"], tmp_path, trials=1, settings=SMALL)
    assert [row.results for row in again[:3]] == [row.results for row in first]
    assert len(trained) == 1


def test_rows_in_parallel_get_their_seeds_in_turn(tmp_path):
    class Recorder:
        def __init__(self):
            self.started = []

        def run(self, tasks):
            self.started += [Path(task.label).relative_to(tmp_path).as_posix() for task in tasks]
            return ((k, Outcome("done")) for k in range(len(tasks)))

    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    given = {"teacher_weights": tmp_path / "teacher.safetensors", "launcher": (recorder := Recorder())}
    rows = compare("digits/tiny", [Variant("one", "ce"), Variant("other", "ce")], tmp_path, trials=2, **given)
    assert recorder.started == ["one/seed-0", "other/seed-0", "one/seed-1", "other/seed-1"]
    assert [row.results for row in rows] == [[], []]


def test_networks_of_ones_own_are_compared_from_the_command_line(letkd, tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    given = ["--data", "digits", "--student", "nets.py:small", "--teacher", "nets.py:large", "--trials", 1]
    small = ["--set", "train.epochs=1", "--set", "data.fraction=0.05"]
    code, out, err = letkd("compare", *given, *small, "--methods", "ce,kd", "--teacher-tap", "stage1=0")
    assert code == 0, err
    assert "run folder: runs/compare-digits-nets.py-small" in out
    kd = RunFolder(tmp_path / "runs/compare-digits-nets.py-small/kd/seed-0").recipe
    assert (kd.student.model, kd.teacher.model, kd.teacher.taps) == ("nets.py:small", "nets.py:large", {"stage1": "0"})
    assert RunFolder(tmp_path / "runs/compare-digits-nets.py-small/teacher").recipe.student.model == "nets.py:large"
    code, _, err = letkd("compare", *given, *small, "--methods", "ce,kd", "--teacher-tap", "stage1=0")
    assert (code, "finished already" in err) == (0, True), err


def test_in_parallel_a_folder_with_another_run_fails_its_row_alone(tmp_path):
    class Idle:
        def run(self, tasks):
            return ((k, Outcome("done")) for k in range(len(tasks)))

    save_file({"weight": torch.zeros(1)}, tmp_path / "teacher.safetensors")
    a_run(tmp_path / "kd" / "seed-0", "digits/tiny/kd", None, settings=("optim.lr=0.3",))
    given = {"teacher_weights": tmp_path / "teacher.safetensors", "launcher": Idle()}
    ce, kd = compare("digits/tiny", ["ce", "kd"], tmp_path, trials=1, **given)
    assert not ce.note
    assert kd.note.startswith("failed: RunError: ")
    assert "holds another run" in kd.note


def test_wrong_names_are_told_before_anything_is_trained(tmp_path):
    with pytest.raises(RecipeError, match="unknown method 'qest'"):
        compare("digits/tiny", ["kd", "qest"], tmp_path, trials=1, settings=SMALL)
    assert not list(tmp_path.iterdir())


def test_phases_come_first_each_with_its_weights_and_rate(tmp_path):
    compare("digits/tiny", [], tmp_path, trials=1, settings=SMALL)
    overrides = {
        "teacher.weights": str(tmp_path / "teacher" / "student.safetensors"),
        "phases": [{"epochs": 2, "weights": {"ce": 0, "kd/penultimate": 1}, "lr": 0.01}],
    }
    recipe = resolve("digits/tiny/quest", overrides=overrides, settings=SMALL)
    assert [phase_at(epoch, recipe)[0] for epoch in (1, 2, 3)] == [1, 2, 1]
    starts = []
    save = state.save_checkpoint
    with pytest.MonkeyPatch.context() as patch:

        def record(folder, module, *args, **given):
            starts.append(module.student.fc.weight.detach().clone())
            save(folder, module, *args, **given)

        patch.setattr(state, "save_checkpoint", record)
        loop.train(recipe, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.01, recipe.optim.lr])
    assert torch.equal(starts[0], starts[1]), "the classifier is not touched while CE weighs nothing"
    assert not torch.equal(starts[1], starts[2])
    assert "fc.weight" in read_state_dict(tmp_path / "run" / "student.safetensors")


# ------------------------------------------------------------------------------------------------ a file of one's own

OWN = """
[data]
name = "digits"
fraction = 0.05
batch_size = 16

[teacher]
model = "resnet8_tiny"

[student]
model = "resnet8_tiny"

[train]
epochs = 1

[rows.few]
like = "letkd-1"
title = "Few centres"
methods.letkd.sites.penultimate.supervision.K = 4

[rows.more]
like = "letkd-1"
title = "More centres"
methods.letkd.sites.penultimate.supervision.K = 8
"""


def test_a_file_of_ones_own_in_processes_as_in_turn(letkd, tmp_path):
    (tmp_path / "mine.toml").write_text(OWN)
    given = ["compare", "mine.toml", "--trials", 2]
    code, out, err = letkd(*given, "--out", "turn")
    assert code == 0, err
    given += ["--jobs", 2, "--out", "spread", "--teacher-weights", "turn/teacher/student.safetensors"]
    code, spread, err = letkd(*given, "--against", "more")
    assert code == 0, err
    for name in ("few", "more"):
        for seed in (0, 1):
            a, b = (
                read_state_dict(tmp_path / way / name / f"seed-{seed}" / "student.safetensors") for way in ("turn", "spread")
            )
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert "Δ to Few centres" in out
    assert "Δ to More centres" in spread
    table = (tmp_path / "spread" / "table.md").read_text()
    assert re.search(r"\| Few centres \| [\d.]+ ± [\d.]+ \| 2 \| [+−][\d.]+ \\\[[+−][\d.]+, [+−][\d.]+\\\] \(2\) \|", table)
    fits = [path.name for path in (tmp_path / "spread" / "supervision").iterdir()]
    assert len(fits) == 2, "one fit for each K, shared by the seeds"
    code, _, err = letkd(*given)
    assert (code, "to go" in err) == (0, False), "nothing is run again"


def test_wrong_files_of_ones_own_get_a_sentence(letkd, tmp_path):
    (tmp_path / "mine.toml").write_text(OWN)
    (tmp_path / "odd.toml").write_text(OWN.replace("[rows.few]", '[rows."../few"]'))
    (tmp_path / "methods.toml").write_text(OWN + "[methods.kd]\n")
    (tmp_path / "like.toml").write_text(OWN.replace('[rows.few]\nlike = "letkd-1"', '[rows.few]\nlike = ["kd", "at"]'))
    for given, says in {
        ("mine.toml", "--methods", "ce,fwe"): "unknown method 'fwe'; nearest: few",
        ("mine.toml", "--against", "fwe"): "--against 'fwe' is not a row of this comparison; nearest: few",
        ("odd.toml",): "the row name '../few' cannot be used as a folder name",
        ("methods.toml",): "methods.toml has a top-level [methods] table (kd), which would apply to every row",
        ("none.toml",): "the recipe file none.toml does not exist",
        ("like.toml",): "like.toml: 'like' of the row 'few' is ['kd', 'at']; name one method or row, as in like = \"kd\"",
    }.items():
        code, _, err = letkd("compare", *given, "--out", "out")
        assert (code, err.count("\n")) == (2, 1), err
        assert says in err
    assert not (tmp_path / "out").exists()


class Fails:
    """A task that kills its process the first time it is called."""

    def __init__(self, folder):
        self.folder = folder

    label = "fails"

    def __call__(self):
        seen = self.folder / "seen"
        if not seen.exists():
            seen.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / "done").touch()


class Sentence:
    label = "sentence"

    def __call__(self):
        raise RecipeError("a sentence of its own")


@dataclass
class Starts:
    """Writes how this process would start others."""

    file: Path
    label = "starts"

    def __call__(self):
        self.file.write_text(multiprocessing.get_start_method())


def test_processes_of_a_run_in_its_own_process_start_as_elsewhere(tmp_path):
    """A spawned process would spawn those that decode images, too, each of which would import torch in every epoch."""
    ((_, outcome),) = Local(1).run([Starts(tmp_path / "method")])
    assert outcome.state == "done"
    assert (tmp_path / "method").read_text() == multiprocessing.get_all_start_methods()[0]


def test_a_killed_process_is_taken_up_by_another_and_errors_come_back_as_sentences(tmp_path, said):
    outcomes = dict(Local(2).run([Fails(tmp_path), Sentence()]))
    assert (outcomes[0].state, outcomes[1].state, outcomes[1].sentence) == ("done", "failed", "a sentence of its own")
    assert (tmp_path / "done").exists()
    assert "fails: killed by signal 9; started again" in said()


def test_settings_of_a_method_do_not_reach_the_teacher_and_an_unknown_method_fails_its_row(tmp_path):
    settings = [*SMALL, "methods.kd.T=2.0", "weights.kd=0.5"]
    teacher, kd = compare("digits/tiny", ["kd"], tmp_path / "one", trials=1, settings=settings)
    assert teacher.results
    recipe = resolve(tmp_path / "one" / "kd" / "seed-0" / "recipe.toml")
    assert (kd.note, recipe.methods["kd"]["T"], recipe.weights["kd"]) == ("", 2.0, 0.5)
    _, row = compare("digits/tiny", ["ce"], tmp_path / "two", trials=1, settings=[*SMALL, "methods.kdd.T=2.0"])
    assert "unknown method 'kdd' (nearest: kd" in row.note
