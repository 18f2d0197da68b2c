"""Hostile files wherever a file is read: nothing in them is ever run, imported or unpacked beyond its bounds."""

import ast
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

import letkd
from letkd.data import load_data
from letkd.data.imagenet import DEVKIT, TRUTH
from letkd.data.pictures import read_picture
from letkd.deploy.runners import open_model
from letkd.distiller.student import FORMAT, load_student
from letkd.errors import DataError, LetkdError
from letkd.models import create_model, load_weights, save_weights
from letkd.recipes import resolve
from letkd.runs.checkpoint import NAME, load_checkpoint
from letkd.runs.folder import RunFolder
from letkd.supervision import KMeansSupervision
from letkd.supervision.artefacts import Origin, load_fitted, path_of
from tests.support.hostile import Touch

SRC = Path(letkd.__file__).parent


@pytest.fixture
def bomb(tmp_path):
    """A pickle, and a way to see whether it ran."""
    mark = tmp_path / "ran"
    content = pickle.dumps({"model": Touch(mark)})
    pickle.loads(content)
    assert mark.exists(), "the bomb is no bomb"
    mark.unlink()
    yield content
    assert not mark.exists(), "code in a file was run"


def as_torch_file(bomb: bytes, tmp_path: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"state_dict": Touch(tmp_path / "ran")}, stream)
    return stream.getvalue()


def test_as_weights(bomb, tmp_path):
    model = create_model("resnet8_tiny", num_classes=3)
    for name in ("w.pth", "w.pt", "w.bin", "w", "w.safetensors", "w.SAFETENSORS"):
        for content in (bomb, as_torch_file(bomb, tmp_path)):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(LetkdError, match=r"could run code|damaged or not a weights file"):
                load_weights(model, tmp_path / name)


def test_as_student_checkpoint_and_supervision(bomb, tmp_path, said):
    (tmp_path / "student.safetensors").write_bytes(bomb)
    with pytest.raises(LetkdError, match="is not a student file"):
        load_student(tmp_path / "student.safetensors")
    module = torch.nn.Linear(2, 2)
    (tmp_path / NAME).write_bytes(bomb)
    with pytest.raises(LetkdError, match="holds no intact checkpoint"):
        load_checkpoint(tmp_path, module, torch.optim.SGD(module.parameters(), lr=0.1))
    supervision = KMeansSupervision(4)
    origin = Origin("t", "p", "d", "s")
    path_of(supervision, tmp_path, "penultimate", origin).write_bytes(bomb)
    assert not load_fitted(supervision, tmp_path, "penultimate", origin)
    assert "not readable" in said()


def test_as_image_and_as_the_development_kit(bomb, tmp_path):
    (tmp_path / "x.png").write_bytes(bomb)
    with pytest.raises(DataError, match="cannot be decoded"):
        read_picture(tmp_path / "x.png")
    for part in ("train/n01", "val", f"{DEVKIT}/data"):
        (tmp_path / "imagenet" / part).mkdir(parents=True)
    (tmp_path / "imagenet" / DEVKIT / "data" / TRUTH).write_text("1\n")
    for content in (bomb, as_torch_file(bomb, tmp_path), b"\x93NUMPY\x01\x00" + bomb):
        (tmp_path / "imagenet" / DEVKIT / "data" / "meta.mat").write_bytes(content)
        with pytest.raises(DataError, match=r"is not the meta\.mat"):
            load_data("imagenet", root=tmp_path / "imagenet")


def test_postscript_is_not_handed_to_another_program(tmp_path):
    (tmp_path / "x.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch ran) (w) file\n%%EOF\n")
    with pytest.raises(DataError, match="not an image in one of the formats"):
        read_picture(tmp_path / "x.jpg")


def test_a_student_file_that_names_code(tmp_path):
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\ndef net(): ...\n")
    for name in (f"{tmp_path / 'evil.py'}:net", "os:getcwd", "timm:resnet18", "transformers:ResNetConfig"):
        header = {"format": FORMAT, "model": name, "num_classes": 3, "changes": []}
        save_file({"w": torch.zeros(1)}, tmp_path / "s.safetensors", metadata={"letkd": json.dumps(header)})
        with pytest.raises(LetkdError, match="code is not run only because a file names it"):
            load_student(tmp_path / "s.safetensors")
    assert not (tmp_path / "ran").exists()


def test_headers_that_announce_what_is_not_there(tmp_path):
    """Sizes in a header take no memory before they are known to be true."""
    model = create_model("resnet8_tiny", num_classes=3)
    huge = {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    header = json.dumps(huge).encode()
    for content in (
        len(header).to_bytes(8, "little") + header,
        (2**62).to_bytes(8, "little") + b"{}",
        (10**6).to_bytes(8, "little") + b"[" * 10**6,
    ):
        (tmp_path / "w.safetensors").write_bytes(content)
        with pytest.raises(LetkdError, match="damaged or not a weights file"):
            load_weights(model, tmp_path / "w.safetensors")


def test_our_weights_carry_a_checksum_over_tensors_and_header(tmp_path):
    model, path = create_model("resnet8_tiny", num_classes=3), tmp_path / "w.safetensors"
    save_weights(model, path, {"epoch": "3"})
    load_weights(model, path)
    whole = path.read_bytes()
    for before, after in ((whole[-1:], bytes([whole[-1] ^ 1])), (b'"epoch":"3"', b'"epoch":"4"')):
        at = whole.rindex(before)
        path.write_bytes(whole[:at] + after + whole[at + len(before) :])
        with pytest.raises(LetkdError, match=r"is damaged \(its checksum differs\)"):
            load_weights(model, path)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    path.write_bytes(save(plain))  # from elsewhere: none to compare with
    load_weights(model, path)


def test_bombs_of_brackets(tmp_path, said):
    recipe = resolve("digits/tiny/ce")
    (tmp_path / "recipe.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(LetkdError, match=r"recipe\.toml is damaged"):
        _ = RunFolder(tmp_path).recipe
    run = RunFolder(tmp_path / "run", recipe)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("[" * 100_000)
    with pytest.raises(LetkdError, match=r"result\.json is damaged"):
        _ = run.result
    (tmp_path / "run" / "metrics.jsonl").write_text("[" * 100_000)
    assert run.rows() == []
    assert "metrics.jsonl is damaged: 1 of its 1 rows cannot be read" in said()


def test_as_an_exported_program(bomb, tmp_path):
    """What is in it does not matter: it is not opened. tests/end_to_end/test_hostile_files.py has files that would do harm."""
    (tmp_path / "evil.pt2").write_bytes(bomb)
    with pytest.raises(LetkdError, match=r"evil\.pt2 was not opened: .*; if you trust its source, add `trust=True`"):
        open_model(tmp_path / "evil.pt2")


# Where the source may do what it may not do elsewhere, and why.
ALLOWED = {
    "exec": {"models/base.py"},  # a model of one's own, from a file that the person named on the command line
    # Likewise; libraries that are optional, by fixed names; this package's own parts.
    "importlib.import_module": {"models/base.py", "models/extras.py", "deploy/runners.py", "__init__.py", "optional.py"},
}
FORBIDDEN = (
    *(
        "eval",
        "exec",
        "pickle.load",
        "pickle.loads",
        "marshal.loads",
        "os.system",
        "os.popen",
        "importlib.import_module",
        "__import__",
    ),
    *("tarfile.extractall", "numpy.load", "np.load", "shelve.open", "joblib.load"),
)


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.slow
def test_the_source_runs_no_code_from_files():
    used = {name: set() for name in ALLOWED}
    for path in sorted(SRC.rglob("*.py")):
        tree, where = ast.parse(path.read_text()), path.relative_to(SRC).as_posix()
        for name, node in calls(tree):
            if name in FORBIDDEN:
                assert where in ALLOWED.get(name, ()), f"{where}:{node.lineno} calls {name}"
                used[name].add(where)
            if name == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("weights_only") == "True", f"{where}:{node.lineno}: torch.load without weights_only=True"
            assert not name.endswith((".extractall", ".extract")), f"{where}:{node.lineno} unpacks an archive unchecked"
            assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{where}:{node.lineno}"
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named = {name.partition(".")[0] for name in names}
            assert not named & {"yaml", "dill", "cloudpickle", "shelve"}, where
            # The one program that is started is this Python, with a script of this package.
            assert "subprocess" not in named or where == "deploy/process.py", where
            assert "unittest" not in named, f"{where} patches other libraries"
    assert used == ALLOWED, "an exception that is not needed any more"
