"""Weights on disk: everything or nothing goes into a model, no code in a file runs, no half-written file is left."""

import copy
import io
import os
import pickle
import stat
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from letkd.errors import CheckpointError, RunError
from letkd.models import create_model, load_weights, save_weights
from letkd.models.weights import read_state_dict
from letkd.tensors import fingerprint


def tiny(seed: int, num_classes: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    model = create_model("resnet8_tiny", num_classes=num_classes)
    model.bn1.num_batches_tracked.fill_(10 + seed)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    other = b.state_dict()
    return a.state_dict().keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in a.state_dict().items())


def refused(model: nn.Module, path: Path, match: str) -> str:
    """The one sentence that loading gives; the model must be as it was."""
    before = copy.deepcopy(model)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_weights(model, path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert path.name in sentence
    assert same(model, before)
    return sentence


def prefixed(state: dict) -> dict:
    return {f"module.{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize("key", [None, "model", "state_dict", "net"])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("new_format", [True, False])
def test_every_wrapping_loads(tmp_path, key, prefix, new_format):
    source, target = tiny(1), tiny(2)
    state = prefixed(source.state_dict()) if prefix else source.state_dict()
    content = state if key is None else {"epoch": 240, key: state, "best": 0.5, "optimizer": {"lr": 0.1}}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=new_format)
    assert not same(source, target)
    load_weights(target, tmp_path / "w.pth")
    assert same(source, target)
    assert read_state_dict(str(tmp_path / "w.pth")).keys() == source.state_dict().keys()


def test_a_file_without_suffix_is_read_as_torch_file(tmp_path):
    source, target = tiny(1), tiny(2)
    torch.save({"model": source.state_dict()}, tmp_path / "student_best")
    load_weights(target, tmp_path / "student_best")
    assert same(source, target)


def test_saved_weights_load_again(tmp_path):
    source, target = tiny(1), tiny(2)
    path = tmp_path / "new" / "folder" / "w.safetensors"
    save_weights(source, path, metadata={"recipe": "letkd-2"})
    load_weights(target, path)
    assert same(source, target)
    with safetensors.safe_open(path, framework="pt") as file:
        assert {"letkd_sha256", "format"} < file.metadata().keys()
        assert {"format": "pt", "recipe": "letkd-2"}.items() <= file.metadata().items()


def test_module_prefix_in_safetensors_is_taken_off(tmp_path):
    source, target = tiny(1), tiny(2)
    safetensors.torch.save_file(prefixed(source.state_dict()), tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert same(source, target)


def test_a_models_own_child_named_module_keeps_its_name(tmp_path):
    source, target = nn.Sequential(), nn.Sequential()
    source.module, target.module = nn.Linear(2, 3), nn.Linear(2, 3)
    save_weights(source, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert same(source, target)


def test_files_without_batch_counters_leave_the_models_own(tmp_path):
    source, target = tiny(1), tiny(2)
    torch.save({k: v for k, v in source.state_dict().items() if "num_batches_tracked" not in k}, tmp_path / "old.pth")
    load_weights(target, tmp_path / "old.pth")
    assert target.bn1.num_batches_tracked == 12
    assert torch.equal(target.bn1.weight, source.bn1.weight)
    assert torch.equal(target.fc.weight, source.fc.weight)


def test_a_model_without_batch_counters_ignores_those_of_the_file(tmp_path):
    source = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    target = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    target[1].num_batches_tracked = None
    torch.save(source.state_dict(), tmp_path / "w.pth")
    load_weights(target, tmp_path / "w.pth")
    assert torch.equal(target[0].weight, source[0].weight)


def test_half_precision_files_load_into_a_models_own_type(tmp_path):
    source, target = tiny(1), tiny(2)
    save_weights(copy.deepcopy(source).bfloat16(), tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert target.fc.weight.dtype == torch.float32
    assert torch.equal(target.fc.weight, source.fc.weight.bfloat16().float())


def test_mismatch_lists_missing_unexpected_and_shapes_and_loads_nothing(tmp_path):
    state = dict(tiny(1, num_classes=9).state_dict())
    del state["conv1.weight"], state["layer1.0.bn1.running_var"]
    state["head.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "w.pth")
    sentence = refused(tiny(2), tmp_path / "w.pth", "does not fit ResNet")
    assert "2 missing keys (conv1.weight, layer1.0.bn1.running_var)" in sentence
    assert "1 unexpected key (head.weight)" in sentence
    assert "2 wrong shapes (fc.weight is [9, 32] in the file and [5, 32] in the model, fc.bias is [9]" in sentence
    assert sentence.endswith("use weights of the same architecture and number of classes")


def test_mismatch_shows_the_first_few_and_counts_the_rest(tmp_path):
    save_weights(create_model("resnet14_tiny", num_classes=5), tmp_path / "w.safetensors")
    sentence = refused(tiny(2), tmp_path / "w.safetensors", r"\b30 unexpected keys \(")
    assert sentence.count("layer1.1.") == 4
    assert ", ...)" in sentence
    assert "missing" not in sentence


def test_integers_do_not_load_into_floats(tmp_path):
    state = dict(tiny(1).state_dict())
    state["fc.weight"] = state["fc.weight"].to(torch.int8)
    torch.save(state, tmp_path / "w.pth")
    refused(tiny(2), tmp_path / "w.pth", r"1 wrong type \(fc.weight is torch.int8 in the file and torch.float32 in the model\)")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            {"epoch": 3, "ema": {}},
            r"holds a dict with 2 keys \(epoch, ema\), not a state dict; save a state dict itself or under",
        ),
        ({}, "holds a dict with no keys"),
        ([1, 2], "holds a list, not a state dict"),
        ({"model": {"a": 1}}, "not a state dict"),
    ],
)
def test_files_without_a_state_dict_say_what_they_hold(tmp_path, content, match):
    torch.save(content, tmp_path / "w.pth")
    refused(tiny(1), tmp_path / "w.pth", match)


@pytest.mark.parametrize("name", ["absent.pth", "absent.safetensors"])
def test_missing_file(tmp_path, name):
    refused(tiny(1), tmp_path / name, "there is no weights file .*absent.*; check the path")


def test_a_folder_is_no_weights_file(tmp_path):
    refused(tiny(1), tmp_path, "there is no weights file")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_truncated_file(tmp_path, suffix, share):
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    if suffix == ".pth":
        torch.save(tiny(1).state_dict(), whole)
    else:
        save_weights(tiny(1), whole)
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(tiny(2), path, "is damaged or not a weights file")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_of_something_else(tmp_path, suffix):
    path = tmp_path / f"notes{suffix}"
    path.write_text("These are my notes.\n" * 100)
    refused(tiny(2), path, "is damaged or not a weights file")


class Hostile:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("written_by", ["pickle", "torch"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_pickle_that_would_run_code_does_not(tmp_path, written_by, suffix):
    path, mark = tmp_path / f"w{suffix}", tmp_path / "was_executed"
    content = {"model": tiny(1).state_dict(), "args": Hostile(f"touch '{mark}'")}
    if written_by == "torch":
        torch.save(content, path)
        torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
        pickle.loads(path.read_bytes())
    assert mark.exists(), "the file must be able to do harm, or this test shows nothing"
    mark.unlink()
    with pytest.raises(CheckpointError):
        read_state_dict(path)
    # A plain pickle may name torch's own helpers before the hostile object, so only torch's container names the object.
    named = "asks to load the Python object .*system, which could run code, so it was not read"
    refused(tiny(2), path, named if written_by == "torch" and suffix == ".pth" else path.name)
    assert not mark.exists()


def test_tied_and_strided_tensors_are_saved_whole(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
            self.register_buffer("column", torch.arange(12.0).view(3, 4)[:, 1])

    source, target = Tied(), Tied()
    target.column.zero_()
    save_weights(source, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert same(source, target)
    assert target.column.tolist() == [1.0, 5.0, 9.0]
    assert target.a.weight is target.b.weight


def test_saving_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(tiny(1), path)
    save_weights(tiny(2), path)
    assert torch.equal(read_state_dict(path)["fc.weight"], tiny(2).fc.weight)
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_saved_weights_have_the_rights_of_any_new_file(tmp_path):
    save_weights(tiny(1), tmp_path / "w.safetensors")
    (tmp_path / "other").touch()
    rights = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("w.safetensors", "other")}
    assert len(rights) == 1


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "w.safetensors"
    save_weights(tiny(1), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(
        RunError, match=r"w\.safetensors could not be written: there is no space left for [\d,]+ bytes; the old file is intact"
    ):
        save_weights(tiny(2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_weights_are_synced_before_they_replace(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    save_weights(tiny(1), tmp_path / "w.safetensors")
    assert steps == ["fsync", "replace", "fsync"]  # the file, its name, the folder that holds the name


def test_saving_under_another_suffix_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"w\.pth does not end in \.safetensors; rename it"):
        save_weights(tiny(1), tmp_path / "w.pth")
    assert os.listdir(tmp_path) == []


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"note": "not a tensor"}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    model = WithExtraState(2, 2)
    with pytest.raises(CheckpointError, match="WithExtraState keeps a dict under '_extra_state' in its state dict"):
        save_weights(model, tmp_path / "w.safetensors")
    assert len(fingerprint(model)) == 64


def test_fingerprint_is_stable():
    model = tiny(1)
    first = fingerprint(model)
    assert len(first) == 64
    assert first == fingerprint(model) == fingerprint(tiny(1)) == fingerprint(copy.deepcopy(model))
    model.bn1.num_batches_tracked += 1
    assert fingerprint(model) == first
    assert fingerprint(model.to(memory_format=torch.channels_last)) == first


def test_fingerprint_changes_with_one_weight_buffer_type_shape_or_name():
    seen = {fingerprint(tiny(1))}

    def is_new(model: nn.Module) -> bool:
        known = len(seen)
        seen.add(fingerprint(model))
        return len(seen) == known + 1

    weight = tiny(1)
    with torch.no_grad():
        bits = weight.layer3[0].conv2.weight.view(torch.int32)
        bits[3, 2, 1, 0] ^= 1
    assert is_new(weight)
    buffer = tiny(1)
    buffer.bn1.running_mean[0] += 1
    assert is_new(buffer)
    assert is_new(tiny(1).bfloat16())
    assert is_new(tiny(1, num_classes=6))
    reshaped = tiny(1)
    reshaped.fc.weight = nn.Parameter(reshaped.fc.weight.detach().reshape(32, 5))
    assert is_new(reshaped)
    renamed = tiny(1)
    renamed.head = renamed.fc
    del renamed.fc
    assert is_new(renamed)


def test_equal_weights_are_equal_bytes(tmp_path):
    """safetensors writes metadata in the order of a hash that differs from call to call."""
    model = create_model("resnet8_tiny", num_classes=3)
    metadata = {f"key {k}": "é\n" * k for k in range(9)}
    files = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for path in files:
        save_weights(model, path, metadata)
    assert len({path.read_bytes() for path in files}) == 1
    with safetensors.safe_open(files[0], framework="pt") as file:
        assert {key: file.metadata()[key] for key in metadata} == metadata
    load_weights(model, files[0])


@pytest.mark.parametrize("odd", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_tensors_without_plain_values(odd, tmp_path):
    torch.save({"w": torch.ones(1), "x": odd}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"w\.pth holds 1 tensor \(x\) without plain values"):
        read_state_dict(tmp_path / "w.pth")


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_nan_is_refused_and_infinity_in_a_mask_is_not(kind, tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    torch.save(model.state_dict(), tmp_path / "w.pth")
    load_weights(model, tmp_path / "w.pth")
    torch.save({**model.state_dict(), "weight": torch.full((2, 2), torch.nan).to(kind)}, tmp_path / "w.pth")
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"w\.pth holds NaN in 1 tensor \(weight\)"):
        load_weights(model, tmp_path / "w.pth")
    assert torch.equal(model.weight, before)


def test_what_a_training_script_saves_beside_its_weights_is_no_nest(tmp_path):
    """Optimiser state, random streams and shapes are tuples, too."""
    model = create_model("resnet8_tiny", num_classes=3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    content = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": (3, tuple(range(625)), None),
        "shape": torch.Size([2]),
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
        assert read_state_dict(tmp_path / "w.pth").keys() == model.state_dict().keys()


def test_buffers_that_are_not_saved_count(tmp_path):
    def with_shift(value: float) -> nn.Module:
        model = tiny(1)
        model.register_buffer("shift", torch.tensor(value), persistent=False)
        return model

    assert len({fingerprint(tiny(1)), fingerprint(with_shift(1.0)), fingerprint(with_shift(-1.0))}) == 3
    assert fingerprint(with_shift(1.0)) == fingerprint(with_shift(1.0))
