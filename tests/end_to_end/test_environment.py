"""Odd environments: closed streams, limits and variables that keep libraries from being imported, models that end the process."""

import os
import resource
import subprocess
import sys

import pytest


def run(*arguments, closed: tuple[int, ...] = (), memory: int | None = None, **variables) -> tuple[int, str, str]:
    """`letkd …` in a process of its own, with standard streams closed or a limit on its memory in bytes."""

    def prepare() -> None:
        for stream in closed:
            os.close(stream)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "letkd", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, preexec_fn=prepare)
    return done.returncode, done.stdout, done.stderr


def test_closed_streams_change_nothing_else(tmp_path):
    train = ["train", "digits/tiny/ce", "--quick", "--student", "resnet8_tiny", "--out", tmp_path / "run"]
    assert run(*train, closed=(0, 1, 2)) == (0, "", "")
    assert (tmp_path / "run" / "result.json").exists()
    assert "run folder" not in (tmp_path / "run" / ".lock").read_text()  # what is printed goes into no file


@pytest.mark.parametrize("stream", [1, 2])
def test_an_error_with_a_closed_stream_keeps_its_exit_code(stream):
    code, out, err = run("show", "nowhere.toml", closed=(stream,))
    assert (code, out) == (2, "")
    assert ("nowhere.toml" in err) == (stream == 1)


@pytest.mark.parametrize("how", [{"TORCH_LOGS": "garbage"}, {"memory": 500_000 * 1024}], ids=["TORCH_LOGS", "ulimit -v"])
def test_a_library_that_cannot_be_imported_is_one_sentence(how):
    code, out, err = run("eval", "nothing.safetensors", **how)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "could not be imported (" in err
    assert "ulimit -v" in err
    assert "TORCH_LOGS" in err


BUILDER = """
import sys
def net(num_classes): sys.exit()
"""
FORWARD = """
import sys
from torch import nn
class net(nn.Sequential):
    def __init__(self, num_classes): super().__init__()
    def forward(self, x): sys.exit()
"""


@pytest.mark.parametrize("source", [BUILDER, FORWARD], ids=["builder", "forward"])
def test_a_model_that_ends_the_process_is_an_error(source, letkd, tmp_path):
    (tmp_path / "own.py").write_text(source)
    code, _, err = letkd("train", "--data", "digits", "--student", "own.py:net", "--out", "run")
    assert (code, err.count("\n")) == (2, 1), err
    assert "SystemExit" in err
