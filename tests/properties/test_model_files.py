"""Model files damaged and forged at random are opened or refused, and nothing else."""

import pytest

from tests.support.fuzz_models import KINDS, fuzz


@pytest.mark.parametrize(("suffix", "cases", "opened"), [(".safetensors", 60, True), (".pth", 60, True), (".onnx", 6, False)])
def test_files_of_every_kind(suffix, cases, opened, tmp_path):
    counts = fuzz(suffix, cases, tmp_path)
    assert counts["unexpected"] == 0
    assert counts["refused"] > 0
    assert counts["opened"] > 0 or not opened, "nothing gets through, so that only the first check was tried"
    assert set(KINDS) == {".safetensors", ".pth", ".onnx", ".pt2"}


def test_no_exported_program_is_opened(tmp_path):
    assert fuzz(".pt2", 20, tmp_path) == {"refused": 20}
