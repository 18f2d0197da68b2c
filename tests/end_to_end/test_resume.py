"""Nothing is lost: runs that are killed, stopped, damaged or out of disk end with the same bits as runs that were not."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch

import letkd.training.loop as loop
from letkd.errors import CheckpointError, NonFiniteError, RunError, Stopped
from letkd.models import create_model, save_weights
from letkd.models.weights import read_state_dict
from letkd.progress import set_quiet
from letkd.runs.checkpoint import NAME, PREVIOUS
from letkd.training.stop import polite_stop
from tests.support.pair import same_state
from tests.support.runs import MIXED, SMALL, recipe_for, same_end, stop_after, weather


@pytest.mark.storm
@pytest.mark.parametrize(("method", "seed"), [("ce", 1), ("letkd-2", 2), ("crd", 3), ("ab", 4)])
def test_a_run_killed_anywhere_ends_with_the_same_bits(method, seed, teacher, tmp_path):
    weather(recipe_for(method, teacher), tmp_path, seed)


@pytest.mark.parametrize(
    ("method", "steps"), [("letkd-2", 1), ("letkd-2", 3), ("crd", 5), ("ab", 4), ("ab", 7), ("mlkd", 4), ("reviewkd", 5)]
)
def test_a_run_stopped_within_an_epoch_goes_on_at_the_next_step(method, steps, teacher, whole, tmp_path, monkeypatch):
    recipe = recipe_for(method, teacher)
    with pytest.raises(Stopped, match=rf"stopped in epoch {1 + (steps - 1) // 3} of {5 if method == 'ab' else 3}"):
        loop.train(recipe, tmp_path / "stopped", on_step=stop_after(steps))
    torch.manual_seed(123)  # whatever happened in between
    loop.train(recipe, tmp_path / "stopped")
    same_end(whole(recipe), tmp_path / "stopped")


@pytest.mark.parametrize(
    "settings", [MIXED, ["data.augment=resized-crop+trivial", "data.mix=mixup"]], ids=["randaugment, cutmix", "trivial, mixup"]
)
def test_a_run_on_mixed_images_goes_on_at_the_next_step(settings, teacher, whole, tmp_path, monkeypatch):
    recipe = recipe_for("letkd-2", teacher, *settings)
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "stopped", on_step=stop_after(5))
    loop.train(recipe, tmp_path / "stopped")
    same_end(whole(recipe), tmp_path / "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_the_exit_code_says_resume_me(number, teacher, tmp_path):
    settings = [part for text in [*SMALL, "train.epochs=500"] for part in ("--set", text)]
    command = [sys.executable, "-m", "letkd", "train", "digits/tiny/letkd-1", "--teacher-weights", str(teacher), *settings]
    run = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() or run.poll() is not None:
            break
        time.sleep(0.1)
    assert metrics.exists()
    run.send_signal(number)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 75, err
    assert "letkd: stopped in epoch" in err
    assert "Traceback" not in err
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
    assert (tmp_path / "run" / "last" / NAME).exists()
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_second_ctrl_c_is_meant():
    with polite_stop() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone", "foreign"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, teacher, whole, tmp_path, monkeypatch, capsys):
    recipe = recipe_for("crd", teacher)
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "run", on_step=stop_after(7))
    last = tmp_path / "run" / "last" / NAME
    content = bytearray(last.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    changed = {"cut": content[: len(content) // 2], "flip": content, "empty": b"", "foreign": b"\x80\x04K\x01."}
    if damage == "gone":  # a kill between the two renames
        last.unlink()
    else:
        last.write_bytes(bytes(changed[damage]))
    set_quiet(False)
    loop.train(recipe, tmp_path / "run")
    told = capsys.readouterr().err
    assert "resumes after epoch 2" in told
    if damage != "gone":
        assert f"{last} is damaged" in told
        assert "the previous checkpoint is used" in told
    same_end(whole(recipe), tmp_path / "run")


def test_two_damaged_checkpoints_are_not_taken_for_a_new_run(teacher, tmp_path, monkeypatch):
    recipe = recipe_for("ce", teacher)
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "run", on_step=stop_after(7))
    for name in (NAME, PREVIOUS):
        (tmp_path / "run" / "last" / name).write_bytes(b"nothing of use")
    with pytest.raises(CheckpointError, match="holds no intact checkpoint; remove it to restart the run"):
        loop.train(recipe, tmp_path / "run")


def test_a_full_disk_is_told_and_the_last_checkpoint_is_intact(teacher, whole, tmp_path):
    """A real limit of the system on the size of files, between that of a row of metrics and that of a checkpoint."""
    recipe = recipe_for("ce", teacher, "train.epochs=4")
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)))
    code = """
import resource, signal, sys
from letkd.recipes import resolve
import letkd.training.loop as loop
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import letkd.training.state as state
save, calls = state.save_checkpoint, []
def save_until_full(*args):
    calls.append(1)
    if len(calls) == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
    save(*args)
state.save_checkpoint = save_until_full
loop.train(resolve(sys.argv[1]), sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "recipe.toml"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "RunError" in done.stderr
    assert "there is no space left for" in done.stderr
    assert "Free some space" in done.stderr
    loop.train(recipe, tmp_path / "run")
    same_end(whole(recipe), tmp_path / "run")


def test_a_folder_that_cannot_be_made(teacher, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"the run folder .* could not be created: Not a directory; choose another with `out=`"):
        loop.train(recipe_for("ce", teacher), tmp_path / "file" / "run")


def test_a_gradient_that_is_not_finite_stops_the_run_and_the_checkpoint_before_it_is_kept(
    teacher, whole, tmp_path, monkeypatch
):
    recipe = recipe_for("letkd-1", teacher)
    forward = loop.Distiller.forward
    calls = []

    def poisoned(self, batch):
        step = forward(self, batch)
        calls.append(1)
        if len(calls) == 5:  # finite itself; its gradient is not
            weight = self.student.fc.weight
            step.loss = step.loss + (weight - weight.detach()).abs().sqrt().sum()
        return step

    with monkeypatch.context() as patch:
        patch.setattr(loop.Distiller, "forward", poisoned)
        with pytest.raises(
            NonFiniteError, match=r"epoch 2: the gradient of 'student\.fc\.weight' became NaN .* in step 2 \(terms: ce="
        ):
            loop.train(recipe, tmp_path / "run")
    loop.train(recipe, tmp_path / "run")
    same_end(whole(recipe), tmp_path / "run")


def test_clipping_bounds_the_gradient(teacher, tmp_path, monkeypatch):
    norms = []
    step = torch.optim.SGD.step

    def spy(self, *args):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    loop.train(recipe_for("ce", teacher, "optim.clip=0.5", "train.epochs=1"), tmp_path / "clipped")
    clipped, norms[:] = list(norms), []
    loop.train(recipe_for("ce", teacher, "train.epochs=1"), tmp_path / "free")
    assert max(norms) > 0.6
    assert max(clipped) <= 0.5 * 1.0001


@pytest.mark.parametrize("moment", ["finished", "half-way", "between"])
def test_a_run_extended_ends_as_if_planned_so(moment, teacher, whole, tmp_path, monkeypatch):
    schedule = ("optim.milestones=[1]", "methods.kd.T=4.0")
    longer = recipe_for("kd", teacher, *schedule, "train.epochs=4")
    with pytest.raises(Stopped) if moment == "half-way" else nullcontext():
        loop.train(recipe_for("kd", teacher, *schedule), tmp_path / "run", on_step=stop_after(5 if moment == "half-way" else 0))
    if moment == "between":  # killed after the old result was removed, before the new recipe was written
        (tmp_path / "run" / "result.json").unlink()
    assert loop.train(longer, tmp_path / "run").epochs == 4
    same_end(whole(longer), tmp_path / "run")


def test_a_run_whose_rates_would_be_others_is_not_extended(teacher, tmp_path):
    loop.train(recipe_for("ce", teacher), tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RunError, match=r"with 9 epochs its rates would have differed: .* in epoch 3; keep them with `optim"):
        loop.train(recipe_for("ce", teacher, "train.epochs=9"), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


@pytest.mark.parametrize("change", ["teacher", "training images", "damage"])
def test_a_run_does_not_resume_with_other_inputs(change, teacher, tmp_path, monkeypatch, said):
    own = tmp_path / "teacher.safetensors"
    shutil.copy(teacher, own)
    recipe = recipe_for("kd", own)
    with pytest.raises(Stopped):
        loop.train(recipe, tmp_path / "run", on_step=stop_after(4))
    if change == "teacher":
        save_weights(create_model("resnet14_tiny", num_classes=10), own)
    elif change == "damage":
        (tmp_path / "run" / "inputs.json").write_text("{")
    else:
        read = loop.read_data
        data = read(recipe)
        other = replace(data.train, images=data.train.images.flip(0))
        monkeypatch.setattr(loop, "read_data", lambda recipe: replace(data, train=other))
    names = "inputs.json is damaged, so the original inputs are unknown" if change == "damage" else change
    with pytest.raises(
        RunError, match=rf"started with other inputs \({names}\); restore them, .* resume anyway with `force=True`"
    ):
        loop.train(recipe, tmp_path / "run")
    said()
    loop.train(recipe, tmp_path / "run", force=True)
    assert re.search(rf"resumes with other inputs than .* \({names}\)", said())


def test_another_seed_does_not_start_with_another_teacher(teacher, tmp_path, said):
    own = tmp_path / "teacher.safetensors"
    shutil.copy(teacher, own)
    one, two, three = (recipe_for("kd", own, "train.epochs=1", f"train.seed={seed}") for seed in range(3))
    loop.train(one, tmp_path / "runs" / "seed-0")
    save_weights(create_model("resnet14_tiny", num_classes=10), own)
    with pytest.raises(
        RunError, match=r"seed-0 started with other inputs \(teacher\); restore them, .* or start another seed anyway"
    ):
        loop.train(two, tmp_path / "runs" / "seed-1")
    loop.train(two, tmp_path / "runs" / "seed-1", force=True)
    assert "seed-1: starts with other inputs than" in said()
    (tmp_path / "runs" / "seed-0" / "inputs.json").write_text("{")  # unknown
    loop.train(three, tmp_path / "runs" / "seed-2")


def test_a_run_resumes_after_its_teacher_has_moved_and_with_other_workers_until_it_is_finished(teacher, tmp_path):
    recipe, folder = recipe_for("kd", teacher), tmp_path / "run"
    whole = loop.train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        loop.train(recipe, folder, on_step=stop_after(4))
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(Path(teacher).read_bytes())
    now = recipe_for("kd", moved, "data.workers=2")
    assert loop.train(now, folder).last_test == whole.last_test
    assert loop.RunFolder(folder).recipe.teacher.weights == str(moved)
    with pytest.raises(RunError, match=r"holds another run \(it differs in teacher\.weights\)"):
        loop.train(recipe, folder)  # its result is not computed again, so it could be that of another teacher


def test_a_finished_run_without_its_student_writes_it_again(teacher, tmp_path, said):
    recipe, folder = recipe_for("kd", teacher), loop.RunFolder(tmp_path / "run")
    result = loop.train(recipe, folder.path)
    student = read_state_dict(folder.student)
    folder.student.unlink()
    assert loop.train(recipe, folder.path).last_test == result.last_test
    assert "student.safetensors is missing and is written again from the last checkpoint" in said()
    assert same_state(read_state_dict(folder.student), student)


@pytest.mark.parametrize("finished", [True, False])
def test_another_title_is_the_same_run(finished, teacher, tmp_path, said):
    recipe, folder = recipe_for("ce", teacher), tmp_path / "run"
    with nullcontext() if finished else pytest.raises(Stopped):
        loop.train(recipe, folder, on_step=stop_after(100 if finished else 4))
    result = loop.train(recipe.model_copy(update={"title": "Alone"}), folder)
    assert ("finished already" in said()) == finished
    assert loop.RunFolder(folder).recipe.title == "Alone"
    assert loop.RunFolder(folder).result == result
