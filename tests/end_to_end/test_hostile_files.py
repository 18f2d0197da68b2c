"""Model files from strangers, through every verb that opens their kind: one sentence, exit code 2, nothing run, read or left over."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from letkd import create_model
from letkd.deploy import worker
from letkd.deploy.process import ModelProcess
from letkd.deploy.runners import open_model
from letkd.distiller.student import FORMAT, save_student
from letkd.errors import CheckpointError
from tests.support import hostile

TRAIN = ["digits/tiny/letkd-1", "--quick", "--teacher", "resnet8_tiny"]
# What each verb says of a file, by what it takes the file for.
MODEL_VERBS = {
    "predict": ["predict", "{file}", "image.png", "--format", "json"],
    "eval": ["eval", "{file}", "--data", "digits"],
    "export": ["export", "{file}", "--to", "onnx", "--out", "made.onnx"],
}
WEIGHT_VERBS = {
    "eval as weights": ["eval", "resnet8_tiny", "--weights", "{file}", "--data", "digits"],
    "eval of a student": ["eval", "{file}", "--student", "resnet8_tiny", "--data", "digits"],
    "train": ["train", *TRAIN, "--teacher-weights", "{file}", "--out", "made"],
    "fit": ["fit", *TRAIN[:1], *TRAIN[2:], "--teacher-weights", "{file}", "--out", "made"],
    "taps": ["taps", "{file}"],
}
VERBS = {**MODEL_VERBS, **WEIGHT_VERBS}


@pytest.fixture
def mark(tmp_path_factory) -> Path:
    """What a hostile file would make or change, outside of the folder that the commands run in."""
    return tmp_path_factory.mktemp("elsewhere") / "mark"


def refused(letkd, file: Path, mark: Path, verbs: dict[str, list[str]]) -> None:
    Image.new("RGB", (8, 8)).save("image.png")
    held = mark.read_bytes() if mark.exists() else None
    before = {path.name for path in Path().iterdir()}
    for name, words in verbs.items():
        code, out, err = letkd(*(word.format(file=file) for word in words))
        assert code == 2, f"{name}: {err}"
        assert "Traceback" not in err
        assert "unexpected error" not in err, f"{name}: {err}"
        *_, last = err.rstrip("\n").split("\n")
        assert last.startswith("letkd: "), f"{name}: {err}"
        assert len(last) < 1000, last
        assert not [line for line in err.splitlines() if "rror" in line and line != last], f"{name}: {err}"
        assert out.strip() in ("", "[\n]"), f"{name}: {out}"
        assert (mark.read_bytes() if mark.exists() else None) == held, f"{name}: the file did harm"
        assert {path.name for path in Path().iterdir()} - {"made"} == before, name


@pytest.mark.parametrize("name", hostile.PROGRAMS)
def test_exported_programs(letkd, mark, tmp_path, name):
    parts = hostile.PROGRAMS[name](hostile.honest_program(), mark)
    (tmp_path / "x.pt2").write_bytes(hostile.as_program(parts))
    refused(letkd, tmp_path / "x.pt2", mark, VERBS)
    for words in (MODEL_VERBS["predict"], MODEL_VERBS["eval"]):
        err = letkd(*(word.format(file="x.pt2") for word in words))[2]
        assert err.startswith("letkd: x.pt2 was not opened: opening a torch.export file can run any code that is in it")
        assert "add --trust" in err


@pytest.mark.parametrize("name", ["guard", "constant", "operation"])
def test_the_programs_are_hostile(name, mark):
    """Without a refusal they do what they were made for."""
    content = hostile.as_program(hostile.PROGRAMS[name](hostile.honest_program(), mark))
    with contextlib.suppress(AssertionError):  # torch's own, on a constant that is none; after it was unpickled
        worker.open_program(content, 1).run(np.zeros((2, 3, 8, 8), np.uint8))
    assert mark.read_bytes() == (bytes(8) if name == "operation" else b"")


def test_a_program_that_is_trusted(letkd, tmp_path):
    (tmp_path / "x.pt2").write_bytes(hostile.as_program(hostile.honest_program()))
    Image.new("RGB", (8, 8), (0, 200, 0)).save("image.png")
    code, out, err = letkd("predict", "x.pt2", "image.png", "--trust", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["classes"][0] == {"class": "1", "probability": 1.0}


def test_a_damaged_program_that_is_trusted_says_one_sentence(tmp_path):
    """In a real process: torch logs a traceback of its own."""
    whole = hostile.as_program(hostile.honest_program())
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    (tmp_path / "x.pt2").write_bytes(whole[:600] + b"\0" * 200 + whole[800:])
    words = [sys.executable, "-m", "letkd", "predict", "x.pt2", "image.png", "--trust"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("letkd: x.pt2 is damaged or not in torch.export format (")


@pytest.mark.parametrize("name", hostile.ONNX)
def test_onnx_files(letkd, mark, tmp_path, name):
    mark.write_bytes(bytes(4))
    (tmp_path / "secret").write_bytes(bytes(4))
    (tmp_path / "x.onnx").write_bytes(hostile.ONNX[name](mark))
    verbs = dict(MODEL_VERBS)
    if name == "an endless loop":
        verbs["predict"] = [*verbs["predict"], "--timeout", "2"]
    # `eval` stops at the classes of the data before it runs the file.
    refused(letkd, tmp_path / "x.onnx", mark, verbs)


def test_onnx_files_as_weights(letkd, mark, tmp_path):
    (tmp_path / "x.onnx").write_bytes(hostile.honest_onnx())
    refused(letkd, tmp_path / "x.onnx", mark, WEIGHT_VERBS)


def test_the_honest_onnx_file_runs(letkd, tmp_path):
    (tmp_path / "x.onnx").write_bytes(hostile.honest_onnx())
    Image.new("RGB", (8, 8), (0, 0, 200)).save("image.png")
    code, out, err = letkd("predict", "x.onnx", "image.png", "--format", "csv", "--top", 1)
    assert (code, err) == (0, "")
    assert out == "image,rank,class,probability\nimage.png,1,2,1.000000\n"


@pytest.mark.parametrize("name", hostile.PTH)
def test_weights_of_torch(letkd, mark, tmp_path, name):
    (tmp_path / "x.pth").write_bytes(hostile.PTH[name](mark))
    refused(letkd, tmp_path / "x.pth", mark, VERBS)


def student_file(path: Path, **header: object) -> None:
    facts = {"format": FORMAT, "model": "resnet8_tiny", "num_classes": 10, "changes": [], **header}
    save_file(create_model("resnet8_tiny", num_classes=10).state_dict(), path, metadata={"letkd": json.dumps(facts)})


FALSE = {
    "code": {"model": "evil.py:net"},
    "classes of another type": {"classes": 5},
    "classes of numbers": {"classes": list(range(10))},
    "names for other classes": {"classes": ["a"]},
    "a mean of text": {"mean": "grey"},
    "a mean of one": {"mean": [0.5]},
    "a std of 0": {"std": [0, 1, 1]},
    "a std of NaN": {"std": [float("nan")] * 3},
    "a size of text": {"size": "large"},
    "a huge size": {"size": [10**6, 10**6]},
    "a resize of text": {"resize": "some"},
    "an input that is none": {"input": ["uint8"]},
    "an input that weights alone cannot take": {"input": "uint8"},
    "an axis that is none": {"dynamic": [[]]},
}


@pytest.mark.parametrize("name", FALSE)
def test_student_files(letkd, mark, tmp_path, name):
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef net(): ...\n")
    student_file(tmp_path / "x.safetensors", **FALSE[name])
    refused(letkd, tmp_path / "x.safetensors", mark, MODEL_VERBS)


def test_a_size_that_the_network_cannot_take(letkd, tmp_path):
    facts = {"mean": [0, 0, 0], "std": [1, 1, 1], "size": [2, 2]}
    save_student(create_model("vgg8", num_classes=3), tmp_path / "x.safetensors", model="vgg8", num_classes=3, **facts)
    Image.new("RGB", (8, 8)).save("image.png")
    code, _, err = letkd("predict", "x.safetensors", "image.png", "--format", "csv")
    assert (code, err.count("\n")) == (2, 1), err
    assert "x.safetensors does not run on images of shape [1, 3, 2, 2]" in err


def test_weights_that_are_not_numbers(letkd, mark, tmp_path):
    network = create_model("resnet8_tiny", num_classes=10)
    network.conv1.weight.data[0, 0, 0, 0] = float("nan")
    save_student(network, tmp_path / "x.safetensors", model="resnet8_tiny", num_classes=10, mean=[0, 0, 0], std=[1, 1, 1])
    refused(letkd, tmp_path / "x.safetensors", mark, {key: words for key, words in VERBS.items() if key != "taps"})
    err = letkd("eval", "x.safetensors", "--data", "digits")[2]
    assert "x.safetensors holds NaN in 1 tensor (conv1.weight)" in err
    torch.save(network.state_dict(), tmp_path / "x.pth")
    refused(letkd, tmp_path / "x.pth", mark, WEIGHT_VERBS)


def test_logits_that_are_not_numbers(letkd, tmp_path):
    network = create_model("resnet8_tiny", num_classes=10)
    network.fc.weight.data.fill_(3e38)  # finite, and too large to add up
    save_student(network, tmp_path / "x.safetensors", model="resnet8_tiny", num_classes=10, mean=[0, 0, 0], std=[1, 1, 1])
    Image.new("RGB", (32, 32), (9, 99, 199)).save("image.png")
    code, out, err = letkd("predict", "x.safetensors", "image.png", "--format", "json")
    assert (code, json.loads(out)) == (2, [])
    assert "x.safetensors returns logits that are NaN or infinite" in err


# ------------------------------------------------------------------------------------------------ a process of its own

COMMAND = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with SIGINT ignored
import letkd.deploy.process as process
from letkd.cli.main import main
run = process.ModelProcess.__call__
def told(self, images):
    print(self.child.pid, flush=True)
    return run(self, images)
process.ModelProcess.__call__ = told
sys.argv = ["letkd", "predict", "x.onnx", "image.png"]
main()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a process that ended and that nobody has waited for is a Z there
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_endless_loop_ends_with_its_command(tmp_path, number, code):
    (tmp_path / "x.onnx").write_bytes(hostile.endless_onnx())
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        pid = int(command.stdout.readline())
        time.sleep(0.3)
        command.send_signal(number)
        _, err = command.communicate(timeout=60)
    assert command.returncode == code
    assert err.count(b"\n") == (code > 0)
    assert gone(pid)


def test_an_endless_loop_ends_in_time(tmp_path):
    (tmp_path / "x.onnx").write_bytes(hostile.endless_onnx())
    process = ModelProcess(tmp_path / "x.onnx")
    process.seconds = 1.0
    with pytest.raises(
        CheckpointError, match=r"x\.onnx did not answer within 1 seconds and was stopped; raise the limit with `timeout=`"
    ):
        process(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert gone(process.child.pid)


def test_a_crash_is_a_sentence(tmp_path):
    parts = hostile.honest_program()
    code = "__import__('os').abort()"
    (tmp_path / "x.pt2").write_bytes(
        hostile.as_program(hostile.edited(parts, "models/model.json", lambda table: table.update(guards_code=[code])))
    )
    with pytest.raises(CheckpointError, match=r"x\.pt2 ended its process \(killed by SIGABRT\)"):
        open_model(tmp_path / "x.pt2", trust=True)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def test_the_process_writes_no_large_files_and_has_limited_memory(tmp_path, monkeypatch):
    import letkd.deploy.process as process

    parts, path = hostile.honest_program(), tmp_path / "x.pt2"

    def doing(code: str) -> None:
        forged = hostile.edited(parts, "models/model.json", lambda table: table.update(guards_code=[code]))
        path.write_bytes(hostile.as_program(forged))
        open_model(path, trust=True)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))

    with pytest.raises(CheckpointError, match="File too large"):
        doing(f"__import__('pathlib').Path('{tmp_path / 'made'}').write_bytes(bytes(2**21))")
    monkeypatch.setattr(process, "memory_limit", lambda: 2**31)
    with pytest.raises(CheckpointError, match="MemoryError"):
        doing("len(bytes(2**32)) > 0")


# ------------------------------------------------------------------------------------------------ what is shown


def test_names_in_files_cannot_steer_the_terminal(letkd, tmp_path):
    network = create_model("resnet8_tiny", num_classes=2)
    facts = {"classes": ["[bold]\x1b[2J\u202e\x9b\r\n", "b"], "mean": [0, 0, 0], "std": [1, 1, 1]}
    save_student(network, tmp_path / "x.safetensors", model="resnet8_tiny", num_classes=2, **facts)
    Image.new("RGB", (32, 32)).save("\x1b[31m.png")
    for form in ("table", "csv", "json"):
        code, out, err = letkd("predict", "x.safetensors", "\x1b[31m.png", "--format", form)
        assert (code, err) == (0, "")
        assert not set(out) & set("\x1b\x9b\u202e\r\x07"), form
        assert "[bold]" in out
        if form == "json":
            row = json.loads(out)[0]
            assert facts["classes"][0] in [part["class"] for part in row["classes"]]
            assert row["image"] == "\x1b[31m.png"
    _, _, err = letkd("predict", "x.safetensors", "\x1b[32m.png")
    assert "\x1b" not in err
    (tmp_path / "[red]x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes())
    _, _, err = letkd("eval", "[red]x.safetensors", "--data", "digits")
    assert "[red]x.safetensors has 2 classes" in err
