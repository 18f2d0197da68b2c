"""Whatever is typed, written or damaged: one sentence and exit code 2, or the right result; never a traceback, never half a run."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.main import get_command

import letkd.training.loop as loop
from letkd.cli.main import app
from letkd.data.unpack import unpack
from letkd.errors import DataError, LetkdError, Stopped
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from tests.support.in_process import letkd
from tests.support.runs import stop_after


def fuzz(n: int) -> settings:
    """The same n examples every time."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


SMALL = ["data.batch_size=16", "data.fraction=1.0", "data.val=0.2", "student.model=resnet8_tiny", "teacher.model=resnet8_tiny"]
K = "methods.letkd.sites.penultimate.supervision.K=4"
INTER = "methods.letkd.sites.intermediate.supervision.K=1"
SETTINGS = [*SMALL, "train.epochs=2", "train.steps=2", K, INTER]
HOSTILE = [
    "",
    "\udcff",
    "x" * 5000,
    "-1",
    "nan",
    "9" * 400,
    "../nowhere",
    "/dev/null",
    "a\nb",
    "'",
    "{" * 2000,
    "٣",
    "%s",
    "--",
    "a=b=c",
]


def polite(code: int, err: str) -> None:
    """Nothing wrong, or one sentence at the end (after what was said on the way), or the usage; and foreseen."""
    assert code in (0, 2), err[-2000:]
    assert "Traceback" not in err
    assert "unexpected error" not in err, err
    if code == 2 and "Usage:" not in err:
        *_, last = err.rstrip("\n").split("\n")
        assert last.startswith("letkd: "), err[-2000:]
        assert len(last) > 20


def fingerprints(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def whole(folder: Path) -> None:
    """No scrap of a file that was being written, and no file of ours that cannot be read."""
    assert not list(folder.rglob("*.tmp"))
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("recipe.toml"):
        tomllib.loads(path.read_text())


def write_cifar(folder: Path) -> Path:
    """The binary version of CIFAR-10, of twenty images a file."""
    random = np.random.RandomState(0)
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        records = random.randint(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A data set, a teacher, a run that ended, and the same one stopped in its last epoch."""
    folder = tmp_path_factory.mktemp("ground")
    data = f"data.root={str(write_cifar(folder / 'cifar'))!r}"
    loop.train(resolve("digits/tiny/teacher", settings=["data.name=cifar10", data, *SETTINGS[:-2]]), folder / "teacher")
    weights = f"teacher.weights={str(folder / 'teacher' / 'student.safetensors')!r}"
    recipe = resolve("digits/tiny/letkd-2", settings=["data.name=cifar10", data, weights, *SETTINGS])
    (folder / "own.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)))
    loop.train(recipe, folder / "ended")
    with pytest.raises(Stopped):
        loop.train(recipe, folder / "stopped", on_step=stop_after(3))
    return folder


# ------------------------------------------------------------------------------------------------ recipes

SECTIONS = ["data", "student", "teacher", "optim", "train", "methods", "weights", "phases", "title", "colour"]
KEYS = [
    "name",
    "root",
    "val",
    "batch_size",
    "size",
    "mean",
    "std",
    "model",
    "taps",
    "lr",
    "clip",
    "milestones",
    "epochs",
    "seed",
    "ce",
    "x y",
]
numbers = st.one_of(st.integers(), st.integers(-(10**30), 10**30), st.floats(), st.sampled_from([10**12, -1, 0, 1e300, 5e-324]))
leaf = st.one_of(numbers, st.booleans(), st.text(max_size=8), st.dates(), st.lists(numbers, max_size=3))
tables = st.dictionaries(
    st.sampled_from(SECTIONS),
    st.one_of(
        leaf, st.dictionaries(st.sampled_from(KEYS), st.one_of(leaf, st.dictionaries(st.text(max_size=3), leaf, max_size=2)))
    ),
    max_size=5,
)


@fuzz(80)
@given(table=tables, cut=st.integers(0, 200))
def test_a_recipe_file_of_anything(tmp_path, table, cut):
    text = tomli_w.dumps(table).encode("utf-8", "replace")
    for content in (text, text[:cut]):
        (tmp_path / "own.toml").write_bytes(content)
        polite(*letkd("show", tmp_path / "own.toml")[::2])
    assert os.listdir(tmp_path) == ["own.toml"]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"a = " + b"[" * 5000,
        b"a" + b".a" * 5000 + b" = 1",
        b"a = " + b"{a=" * 2000,
        b"\0",
        b"a = 1\na = 2",
        b"a = 0x" + b"f" * 999,
    ],
    ids=["no UTF-8", "deep list", "deep key", "deep table", "NUL", "twice", "huge number"],
)
def test_recipe_files_that_are_traps(tmp_path, content):
    (tmp_path / "own.toml").write_bytes(content)
    code, _, err = letkd("show", tmp_path / "own.toml")
    assert code == 2
    polite(code, err)


@fuzz(60)
@given(key=st.text(max_size=12), value=st.text(max_size=12))
def test_set_takes_any_text(key, value):
    code, _, err = letkd("show", "digits/tiny/ce", "--set", f"{key}={value}")
    polite(code, err)


P, S = "methods.letkd.sites.penultimate", "methods.letkd.sites.intermediate.supervision"
COUNTS = ("data.batch_size", "train.epochs", "train.steps")
SIZES = (f"{P}.supervision.K", f"{P}.supervision.iterations", f"{S}.K", f"{S}.r")
VALUES = {
    **{key: ["0", "-3", "1e30", "'x'", "1000000000000", "9" * 30, "[1]", "nan"] for key in COUNTS},
    **{key: ["0", "-3", "1e9", "'x'", "1000000000000", "9" * 30, "true", "[1]", "nan"] for key in SIZES},
    "train.seed": ["-1", "4294967296", "9" * 30],
    "data.workers": ["-1", "1000000"],
    "data.std": ["[0,0,0]", "[nan,1,1]", "[-1,1,1]", "[1e-300,1,1]"],
    "data.mean": ["[inf,0,0]", "[1e300,0,0]", "5"],
    "optim.lr": ["inf", "nan", "1e300", "0"],
    "optim.weight_decay": ["inf", "1e300"],
    "weights.ce": ["inf", "nan", "1e300", "-1"],
    "phases": [
        "5",
        "[{}]",
        "[{epochs=1,weights={ce=nan}}]",
        "[{epochs=1,weights={xx=1}}]",
        "[{epochs=1,weights={ce=1},lr=inf}]",
    ],
    f"{P}.alpha": ["nan", "'x'", "[1]", "1e300"],
    f"{P}.scale_omega": ["nan", "'a'"],
    f"{P}.normalize_value_input": ["'yes'", "1"],
    f"{P}.supervision.tau": ["nan", "0", "-1", "1e300"],
    f"{P}.supervision.least": ["0", "-1", "2", "nan"],
    f"{P}.supervision.pixels_per_centre": ["0", "'some'", "9" * 30],
    f"{P}.supervision.seed": ["-1", "9" * 30],
    f"{S}.kind": ["5", "[1]", "{}", "'nope'"],
    "methods.kd.T": ["0", "nan", "-4"],
    "methods.crd.feat_dim": ["0", "1000000000000"],
    "methods.crd.tau": ["0"],
    "methods.crd.memory": ["'much'", "0"],
    "methods": ["5", "{letkd=5}"],
    "student.model": ["''", "':'", "'a..b:c'", "'..:x'", "'timm:'", "'" + "x" * 5000 + ".py:y'"],
    "teacher.weights": ["''", "'/'", "'" + "x" * 5000 + "'"],
    "student.taps.penultimate": ["''", "'nowhere'"],
    "title": ["\udcff", "5"],
}


@pytest.mark.parametrize("key", VALUES)
def test_values_that_cannot_be_meant(ground, key):
    """Told before anything is written, and before any memory is taken for them."""
    for value in VALUES[key]:
        code, _, err = letkd("train", ground / "own.toml", "--set", f"{key}={value}", "--out", ground / "run")
        assert code == 2, f"{key}={value}: {err}"
        polite(code, err)
        assert not (ground / "run").exists()


# ------------------------------------------------------------------------------------------------ run folders

FILES = [
    *(
        "last/checkpoint.safetensors",
        "last/previous.safetensors",
        "best_on_validation.safetensors",
        "metrics.jsonl",
        "recipe.toml",
    ),
    *("env.json", "supervision/penultimate.kmeans.*", "supervision/intermediate.subclass.*"),
]
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("head"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.sampled_from(["deep", "list", "folder"]), st.just(0.0)),
)


def damage(path: Path, kind: str, where: float) -> None:
    content = bytearray(path.read_bytes())
    if kind == "cut":
        content = content[: int(where * len(content))]
    elif kind in ("flip", "head"):  # anywhere; or near the start, where headers are
        content[int(where * (len(content) if kind == "flip" else min(len(content), 1500)))] ^= 1 << (int(where * 1e6) % 8)
    elif kind == "folder":
        path.unlink()
        path.mkdir()
        return
    else:
        content = b"[" * 100_000 if kind == "deep" else b"[1, 2]\n"
    path.write_bytes(content)


def command(ground: Path, run: Path) -> list[object]:
    return ["train", ground / "own.toml", "--out", run]


@fuzz(20)
@given(name=st.sampled_from(FILES), how=damages)
def test_a_stopped_run_with_a_damaged_file(ground, name, how):
    run = ground / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(ground / "stopped", run)
    damage(next(run.glob(name)), *how)
    others = {part: fingerprints(ground / part) for part in ("cifar", "teacher", "ended", "stopped")}
    code, _, err = letkd(*command(ground, run))
    polite(code, err)
    assert others == {part: fingerprints(ground / part) for part in others}
    assert not list(run.rglob("*.tmp"))
    if code == 0:
        a, b = (read_state_dict(folder / "student.safetensors") for folder in (run, ground / "ended"))
        assert all(torch.equal(a[key], b[key]) for key in b), "another result"
    else:
        assert str(run) in err, "which file?"
    shutil.rmtree(run)


def test_a_damaged_best_epoch_is_named_and_the_last_still_reported(ground, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ground / "ended", run)
    (run / "result.json").unlink()
    damage(run / "best_on_validation.safetensors", "flip", 0.9)
    code, _, err = letkd(*command(ground, run))
    assert code == 0, err
    assert "best_on_validation.safetensors is damaged (its checksum differs)" in err
    result, before = (json.loads((folder / "result.json").read_text()) for folder in (run, ground / "ended"))
    assert result["best_val_test"] is None
    assert result["last_test"] == before["last_test"]


@fuzz(25)
@given(name=st.sampled_from(["student.safetensors", "recipe.toml", "result.json"]), how=damages)
def test_an_ended_run_with_a_damaged_file(ground, name, how):
    run = ground / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(ground / "ended", run)
    damage(run / name, *how)
    before = fingerprints(run)
    verb = ["eval", run] if name != "result.json" else command(ground, run)
    code, out, err = letkd(*verb)
    polite(code, err)
    if code == 0 and name == "student.safetensors":
        assert out.split("\n")[1:] == letkd("eval", ground / "ended")[1].split("\n")[1:], "another accuracy"
    if code:
        assert str(run) in err or "Usage" in err
    assert fingerprints(run) == before
    shutil.rmtree(run)


def test_a_removed_result_is_worked_out_anew(ground, tmp_path):
    """As the sentence about a damaged one says."""
    run = tmp_path / "run"
    shutil.copytree(ground / "ended", run)
    (run / "result.json").write_text('{"last_test": "high"}')
    code, _, err = letkd(*command(ground, run))
    assert code == 2
    assert "result.json is damaged" in err
    (run / "result.json").unlink()
    assert letkd(*command(ground, run))[0] == 0
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, ground / "ended")]
    times = {"seconds": 0, "cpu_seconds": 0}
    assert results[0] | times == results[1] | times


# ------------------------------------------------------------------------------------------------ data files


def as_archive(folder: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(folder, "cifar-10-batches-bin")
    return stream.getvalue()


@fuzz(25)
@given(kind=st.sampled_from(["cut", "flip", "head"]), where=st.floats(0, 1, exclude_max=True), archive=st.booleans())
def test_damaged_cifar_files(ground, kind, where, archive):
    root = ground / "data"
    shutil.rmtree(root, ignore_errors=True)
    if archive:
        root.mkdir()
        path = root / "cifar-10-binary.tar.gz"
        path.write_bytes(as_archive(ground / "cifar"))
    else:
        shutil.copytree(ground / "cifar", root)
        path = root / "data_batch_3.bin"
    damage(path, kind, where)
    before = fingerprints(root)
    code, _, err = letkd(
        "eval", "resnet8_tiny", "--weights", ground / "teacher/student.safetensors", "--data", "cifar10", "--root", root
    )
    polite(code, err)
    assert code == 0 or str(root) in err
    assert fingerprints(root) == before


@fuzz(30)
@given(
    suffix=st.sampled_from(["jpg", "png", "gif", "bmp", "tiff", "webp", "ppm"]),
    kind=st.sampled_from(["cut", "flip", "head"]),
    where=st.floats(0, 1, exclude_max=True),
)
def test_damaged_image_files(tmp_path, suffix, kind, where):
    root = tmp_path / "tree"
    shutil.rmtree(root, ignore_errors=True)
    for k, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        Image.fromarray(np.random.RandomState(k).randint(0, 256, (9, 7, 3), dtype=np.uint8)).save(root / name / f"1.{suffix}")
    damage(root / "cat" / f"1.{suffix}", kind, where)
    code, out, err = letkd("data", "check", "folder", "--root", root, "--workers", 0)
    polite(code, err)
    assert code == 0 or f"cat/1.{suffix}" in out


@fuzz(40)
@given(
    kind=st.sampled_from(["cut", "flip", "head"]),
    where=st.floats(0, 1, exclude_max=True),
    suffix=st.sampled_from([".zip", ".tar.gz"]),
)
def test_damaged_archives_unpack_whole_or_not_at_all(tmp_path, kind, where, suffix):
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    path, content = tmp_path / f"a{suffix}", bytes(range(256)) * 8
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("home/file", content)
    else:
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / "file").write_bytes(content)
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "home", "home")
    damage(path, kind, where)
    try:
        home = unpack(path, root, folder="home", limit=10_000, files=5)
    except DataError:
        assert not list(root.iterdir())
    else:
        assert os.listdir(root) == ["home"]
        assert not (home / "file").exists() or (home / "file").read_bytes() == content or suffix == ".tar.gz"


# ------------------------------------------------------------------------------------------------ the command line

VERBS = {name: verb for name, verb in get_command(app).commands.items() if name not in ("data", "demo", "methods")}
SAFE = {"train": ["--quick"], "compare": ["--quick", "--methods", "nope"], "fit": ["--method", "nope"], "models": ["nope"]}


@st.composite
def command_lines(draw):
    verb = draw(st.sampled_from(sorted(VERBS)))
    options = [
        option for option in VERBS[verb].params if option.param_type_name == "option" and option.name not in ("help", "out")
    ]
    words = [verb, *draw(st.lists(st.sampled_from(HOSTILE), max_size=2))]
    for option in draw(st.lists(st.sampled_from(options), min_size=1, max_size=2)):
        words += [option.opts[0], *([] if option.is_flag else [draw(st.sampled_from(HOSTILE))])]
    return [*words, *SAFE.get(verb, [])]


@fuzz(120)
@given(words=command_lines())
def test_any_command_line(tmp_path, words):
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        code, _, err = letkd(*words)
    finally:
        os.chdir(before)
    polite(code, err)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits/tiny/ce", "--quick", "--out", "x" * 300],
        ["train", "digits/tiny/ce", "--quick", "--out", "/proc/nowhere/run"],
        ["train", "digits/tiny/ce", "--quick", "--seed", "4294967295", "--trials", "2"],
        ["train", "digits/tiny/ce", "--quick", "--trials", "99999999999"],
        ["train", "digits/tiny/ce", "--quick", "--trials", "2", "--jobs", "100000"],
        ["train", "\0.toml"],
        ["taps", "resnet8", "--input", "9" * 5000 + "x1"],
        ["taps", "resnet8", "--num-classes", "9" * 30],
        ["data", "get", "\udcff"],
        ["data", "check", "cifar10", "--root", "x" * 5000],
        ["data", "check", "folder", "--root", ".", "--workers", "1000000"],
        ["demo", "--trials", "0"],
        ["methods", "what?"],
        ["eval", "resnet8", "--weights", "/dev/null", "--data", "digits"],
        ["fit", "digits/tiny/letkd-1", "--teacher-weights", "/"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_command_lines_that_are_wrong(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = letkd(*words)
    assert code == 2, err
    polite(code, err)
    assert not any(tmp_path.iterdir())


def test_a_real_process_with_bytes_that_are_no_text():
    words = [sys.executable.encode(), b"-m", b"letkd", b"show", b"digits/tiny/ce", b"--set", b"title=\xff\xfe"]
    done = subprocess.run(words, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(b"letkd: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (KeyError("x"), "unexpected error, KeyError: 'x'", 1),
        (MemoryError(), "not enough memory (", 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto"), "not enough memory (", 2),
        (PermissionError(13, "Permission denied", "a\nb"), "Permission denied; check the path and its permissions", 2),
        (RecursionError(), "too deeply nested", 2),
        (LetkdError("two\nlines"), "two lines", 2),
    ],
)
def test_the_last_net(monkeypatch, error, says, code):
    def fail(**values):
        raise error

    monkeypatch.setattr("letkd.recipes.list_cells", fail)
    found, _, err = letkd("list")
    assert found == code
    assert says in err
    assert err.startswith("letkd: ")
    assert err.count("\n") == 1
    with pytest.raises(type(error)):
        letkd("--debug", "list")
    monkeypatch.setenv("WORLD_SIZE", "2")  # a worker that dies does so with its own traceback
    if code == 1:
        with pytest.raises(KeyError):
            letkd("list")
