"""`make evidence` on a small imitation of CIFAR-10's official files."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from letkd.errors import DataError, RecipeError
from letkd.models import create_model, save_weights

ROOT = Path(__file__).parents[2]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "evidence"))
    try:
        import run

        yield run
    finally:
        sys.path.remove(str(ROOT / "evidence"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with 200 training images and 40 test images, and an untrained teacher."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar-10-batches-bin").mkdir()
    random = np.random.RandomState(0)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        labels = np.arange(40, dtype=np.uint8)[:, None] % 10
        records = np.concatenate([labels, random.randint(0, 256, (40, 3072)).astype(np.uint8)], axis=1)
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    torch.manual_seed(0)
    save_weights(create_model("resnet56_a", num_classes=10), folder / "teacher.safetensors")
    return str(folder), str(folder / "teacher.safetensors")


@pytest.mark.slow
def test_the_smallest_pair_runs_end_to_end(script, files, tmp_path, capfd):
    out, rows = tmp_path / "runs", ["ce-larger", "letkd-1"]
    assert script.run(*files, seeds=1, epochs=1, rows=rows, out=out) == 0
    text = capfd.readouterr().out
    assert "2 rows × 1 seeds, 2 runs left; at " in text
    ours, published = text.partition("Your runs")[2].split("Published runs")
    assert re.search(r"^\| letKD-1 \| \**\d+\.\d+\** \| 1 \|", ours, re.M)
    assert re.search(r"^\| CE, larger \|.* \| 146,640 \| \d+\.\d min \|", ours, re.M)
    assert "| KD | – | 0 |" in ours
    assert published.strip()
    assert "2 seeds, 2 runs left" in script.announce(rows, 2, script.settings_for(1), out)


def test_the_time_of_all_runs_is_said(script, tmp_path):
    rows = list(script.rows_of(script.PAIR))
    said = script.announce(rows, 5, [], tmp_path)
    assert f"{len(rows)} rows × 5 seeds, {5 * len(rows)} runs left; at " in said
    assert re.search(r" at \d+\.\d minutes per run and core, about \d+\.\d hours with 2 cores", said)


def test_missing_files_are_one_sentence(script, files, tmp_path):
    data, teacher = files
    with pytest.raises(DataError, match=r"^DATA is not set: name a folder .* `letkd data get cifar10` downloads them$"):
        script.check_files("", teacher)
    with pytest.raises(DataError, match=r"^TEACHER is not set: name the weights of a CIFAR-10 ResNet-56"):
        script.check_files(data, "")
    with pytest.raises(DataError, match=r"^TEACHER=nowhere.pth is not a file: name the weights"):
        script.check_files(data, "nowhere.pth")
    with pytest.raises(DataError, match=r"get it with `letkd data get cifar10`"):
        script.check_files(str(tmp_path), teacher)
    with pytest.raises(RecipeError, match=r"has no row 'letkd-9'; it has ce, ce-longer"):
        script.run(data, teacher, seeds=1, epochs=1, rows=["letkd-9"], out=tmp_path / "out")


def test_the_command_ends_with_one_line():
    ended = subprocess.run([sys.executable, str(ROOT / "evidence/run.py")], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("DATA is not set")
    assert len(ended.stderr.splitlines()) == 1
