"""Damaged run folders: every kind of file in one, through every command that reads it.

    python -m tests.support.fuzz_runs CASES [SEED]

prints how many cases ended in which way, by command and by file. An end that is none of the allowed ones is shown with its case and makes
the exit code 1. test_run_folders.py runs a few of the same cases.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import letkd.training.loop as loop
from letkd.errors import RESUME_ME, Stopped
from letkd.progress import set_quiet
from letkd.recipes import resolve
from letkd.runs.folder import RunFolder
from letkd.tensors import checksum
from tests.support.in_process import letkd
from tests.support.runs import stop_after

SETTINGS = [
    *("data.batch_size=16", "data.fraction=0.05", "train.epochs=2", "train.steps=2"),
    *("student.model=resnet8_tiny", "teacher.model=resnet8_tiny"),
]
K = ["methods.letkd.sites.penultimate.supervision.K=4", "methods.letkd.sites.intermediate.supervision.K=1"]
TEXTS = ["recipe.toml", "metrics.jsonl", "env.json", "result.json", "note.json"]
TENSORS = [
    *("student.safetensors", "predictions.safetensors", "best_on_validation.safetensors"),
    *("last/checkpoint.safetensors", "last/previous.safetensors"),
    *("supervision/penultimate.kmeans.safetensors", "supervision/intermediate.subclass.safetensors"),
]
OTHERS = [".lock", "last", "supervision", "tensorboard"]
VALUES = [
    None,
    True,
    -1,
    0,
    1e12,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1],
    {},
    {"a": {}},
    "\u0000",
    "ä" * 300,
]
VERBS = ("report", "export unfinished", "train", "report", "compare", "export", "export unfinished", "train", "compare", "eval")


@dataclass(frozen=True)
class Ground:
    """Where runs are made: a teacher, a finished run, the same one stopped in its last epoch, and a comparison."""

    folder: Path

    @property
    def teacher(self) -> Path:
        return RunFolder(self.folder / "teacher").student

    def command(self, verb: str, run: Path) -> list[object]:
        return {
            "report": ["report", run, "--out", self.folder / "out"],
            "export": ["export", run, "--to", "safetensors", "--out", self.folder / "out" / "s.safetensors"],
            "export unfinished": ["export", run, "--to", "safetensors"],
            "eval": ["eval", run],
            "train": ["train", self.folder / "own.toml", "--out", run],
            "compare": [
                *("compare", "digits/tiny", "--methods", "ce", "--trials", 1, "--teacher-weights", self.teacher, "--out", run),
                *(word for text in SETTINGS for word in ("--set", text)),
            ],
        }[verb]


def make_ground(folder: Path) -> Ground:
    ground = Ground(folder)
    loop.train(resolve("digits/tiny/teacher", settings=SETTINGS), folder / "teacher")
    recipe = resolve("digits/tiny/letkd-2", settings=[*SETTINGS, *K], overrides={"teacher.weights": str(ground.teacher)})
    (folder / "own.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)))
    loop.train(recipe, folder / "ended")
    (folder / "ended" / "note.json").write_text(json.dumps(dict.fromkeys(("pair", "method", "title", "note"), "x")))
    with contextlib.suppress(Stopped):
        loop.train(recipe, folder / "stopped", on_step=stop_after(3))
    code, _, err = letkd(*ground.command("compare", folder / "compared"))
    assert code == 0, err
    return ground


# ------------------------------------------------------------------------------------------------ damages


def damage(path: Path, chance: random.Random) -> str:
    """Damage a file in one of many ways; says which."""
    ways = ["cut", "flip", "flips", "head", "zeros", "deep", "list", "empty", "bytes", "folder", "gone", "doubled", "swapped"]
    if path.suffix in (".json", ".jsonl", ".toml"):
        ways += ["value", "value", "value", "digits", "line"]
    if path.suffix == ".safetensors":
        ways += ["tensor", "tensor", "facts", "facts"]
    way = chance.choice(ways)
    content = bytearray(path.read_bytes())
    n = len(content)
    if way == "cut":
        content = content[: chance.randrange(n + 1)]
    elif way in ("flip", "flips", "head"):
        for _ in range(20 if way == "flips" else 1):
            content[chance.randrange(min(n, 1500) if way == "head" else n)] ^= 1 << chance.randrange(8)
    elif way == "zeros":
        at = chance.randrange(n)
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif way == "folder":
        path.unlink()
        path.mkdir()
        return way
    elif way == "gone":
        path.unlink()
        return way
    elif way in ("value", "tensor", "facts"):
        (_as_value if way == "value" else _as_tensors)(path, way, chance)
        return way
    elif way == "digits":  # any digit another one: what stays readable and means something else
        digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
        for i in chance.sample(digits, min(len(digits), 3)):
            content[i] = ord(chance.choice("0123456789e.-"))
    elif way == "line":
        lines = bytes(content).splitlines(keepends=True)
        chance.shuffle(lines)
        content = bytearray(b"".join(lines[: chance.randrange(1, len(lines) + 1)]))
    else:
        content = bytearray(
            {
                "deep": b"[" * 100_000,
                "list": b"[1, 2]\n",
                "empty": b"",
                "bytes": chance.randbytes(200),
                "doubled": bytes(content) * 2,
                "swapped": bytes(content[n // 2 :] + content[: n // 2]),
            }[way]
        )
    path.write_bytes(content)
    return way


def _as_value(path: Path, way: str, chance: random.Random) -> None:
    """Another value, of any type, in any place."""
    value = chance.choice(VALUES)
    if path.suffix == ".toml":
        lines = path.read_text().splitlines()
        at = [i for i, line in enumerate(lines) if " = " in line]
        i = chance.choice(at)
        text = {None: '"x"', True: "true"}.get(value if isinstance(value, bool | None) else 0, json.dumps(value))
        lines[i] = f"{lines[i].partition(' = ')[0]} = {text.replace('NaN', 'nan').replace('Infinity', 'inf').replace(':', '=')}"
        path.write_text("\n".join(lines))
        return
    rows = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.suffix == ".jsonl"
        else [json.loads(path.read_text())]
    )
    table = chance.choice(rows)
    while True:
        key = chance.choice([*table, "new key"])
        if isinstance(table.get(key), dict) and table[key] and chance.random() < 0.7:
            table = table[key]
        else:
            table[key] = value
            break
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def _as_tensors(path: Path, way: str, chance: random.Random) -> None:
    """Another tensor, or other facts in the header, under a checksum that is right: what no checksum can find."""
    with safe_open(path, framework="pt") as file:
        facts, tensors = dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if way == "tensor":
        name = chance.choice(sorted(tensors))
        value = tensors[name]
        how = chance.choice(["nan", "inf", "shape", "type", "less", "negative", "huge", "gone", "none"])
        if how in ("nan", "inf") and value.is_floating_point():
            value = value.clone()
            value.view(-1)[:1] = float(how)
        elif how == "shape":
            value = value.reshape(-1)[None]
        elif how == "type":
            value = value.to(chance.choice([torch.float64, torch.int8, torch.float16, torch.bool]))
        elif how == "less":
            value = value[:1] if value.dim() else value
        elif how == "none":
            value = value.new_zeros(0)
        elif how == "negative":
            value = -value if value.dtype != torch.bool else value
        elif how == "huge":
            value = value * 1_000_000
        tensors[name] = value.contiguous()
        if how == "gone":
            del tensors[name]
    elif facts:
        key = chance.choice(sorted(facts))
        table = json.loads(facts[key]) if facts[key].startswith("{") else None
        if isinstance(table, dict) and table:
            table[chance.choice(sorted(table))] = chance.choice(VALUES)
            facts[key] = json.dumps(table)
        else:
            facts[key] = chance.choice(["", "x", "[" * 1000, "{}", "null"])
    save_file(tensors, path, metadata=_summed(path.name, tensors, facts) or None)


def _summed(name: str, tensors: dict[str, torch.Tensor], facts: dict[str, str]) -> dict[str, str]:
    if "letkd_sha256" in facts:
        rest = {key: value for key, value in facts.items() if key != "letkd_sha256"}
        return {**rest, "letkd_sha256": checksum(tensors, json.dumps(rest, sort_keys=True))}
    if "state" in facts:
        return {**facts, "sha256": checksum(tensors, facts["state"])}
    if "report" in facts:
        return {**facts, "sha256": checksum(tensors, facts["report"])}
    return {**facts, "sha256": checksum(tensors)} if "sha256" in facts else facts


def damage_folder(path: Path, chance: random.Random) -> str:
    """What is a folder, or a lock, becomes something else."""
    way = chance.choice(["gone", "file", "link", "dangling", "deep"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if way == "file":
        path.write_bytes(chance.randbytes(50))
    elif way == "link":
        path.symlink_to(path.parent.parent)
    elif way == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif way == "deep":
        (path / "a" / "b").mkdir(parents=True)
    return way


# ------------------------------------------------------------------------------------------------ cases

# Which folder each command begins with, and which of its files it reads.
STARTS = {
    "report": ("ended", "ended", "stopped"),
    "export": ("ended",),
    "export unfinished": ("stopped",),
    "eval": ("ended",),
    "train": ("stopped", *("ended",) * 4),
    "compare": ("compared",),
}
READS = {
    "report": [*TEXTS, "student.safetensors", *("predictions.safetensors",) * 2, *TENSORS[3:5], "last"],
    "export": ["recipe.toml", "result.json", "student.safetensors"],
    "export unfinished": ["recipe.toml", "metrics.jsonl", "metrics.jsonl", "result.json", "last"],
    "eval": ["recipe.toml", "student.safetensors"],
    "train": [*TEXTS, *TENSORS, *OTHERS],
    "compare": [*TEXTS, *OTHERS],
}


@dataclass(frozen=True)
class Case:
    """One damaged file, one command, and how it ended."""

    verb: str
    name: str
    how: str
    code: int
    err: str
    missing: str

    @property
    def outcome(self) -> str:
        if self.missing:
            return self.missing
        return {0: "done", 2: "one sentence"}.get(self.code, f"exit code {self.code}")

    @property
    def allowed(self) -> bool:
        return self.outcome in ("done", "one sentence")


def run_case(ground: Ground, seed: int) -> Case:
    """The same case for the same number."""
    chance = random.Random(seed)
    verb = VERBS[seed % len(VERBS)]
    start = chance.choice(STARTS[verb])
    home = ground.folder / "case"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(ground.folder / start, home)
    run = home / "ce" / "seed-0" if verb == "compare" else home
    names = [name for name in READS[verb] if (run / name).exists()]
    name = chance.choice(names)
    how = damage_folder(run / name, chance) if name in OTHERS else damage(run / name, chance)
    torch.manual_seed(0)
    np.random.seed(0)
    with cheap_report(name, draw=chance.random() < 0.03) if verb == "report" else contextlib.nullcontext():
        code, _, err = letkd(*ground.command(verb, home))
    return Case(verb, f"{start}/{name}", how, code, err, _wrong(code, err))


def _wrong(code: int, err: str) -> str:
    if "unexpected error" in err:
        return "unexpected error"
    if "Traceback" in err:
        return "traceback"
    if code == 2 and not (err.rstrip("\n").split("\n")[-1].startswith("letkd: ") and len(err) > 20):
        return "no sentence"
    return ""


@contextlib.contextmanager
def cheap_report(name: str, draw: bool) -> Iterator[None]:
    """The report without what a damaged file cannot change, and with small figures or none: a case takes a tenth of the time."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    import letkd.report.sections as sections
    import letkd.report.write as write

    def write_small(path: Path, content: object) -> None:
        if isinstance(content, str):
            real(path, content)
            return
        for label in content.findobj(Text):
            label.set_parse_math(False)
        with rc_context({"text.parse_math": False}):
            content.savefig(io.BytesIO(), format="png", dpi=15)

    real = write.write_file
    changed: dict[str, object] = {}
    if not draw:
        changed |= dict.fromkeys(("draw", "draw_all", "draw_knowledge", "draw_planes", "draw_differences"), lambda *a, **b: "")
    if name not in ("recipe.toml", "last") and not name.startswith("last/"):
        changed["knowledge_of"] = lambda *values: ""
    if name not in ("recipe.toml", "student.safetensors"):
        changed["features_of"] = lambda *values: ""
    before = {key: getattr(sections, key) for key in changed}
    write.write_file = write_small
    for key, value in changed.items():
        setattr(sections, key, value)
    try:
        yield
    finally:
        write.write_file = real
        for key, value in before.items():
            setattr(sections, key, value)


def main_of_script(cases: int, seed: int) -> int:
    torch.set_num_threads(1)
    set_quiet(True)
    ends: Counter[tuple[str, str]] = Counter()
    files: Counter[tuple[str, str]] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        ground = make_ground(Path(folder))
        for number in range(seed, seed + cases):
            case = run_case(ground, number)
            if case.code == RESUME_ME:
                sys.exit("stopped")
            ends[case.verb, case.outcome] += 1
            files[case.name.partition("/")[2], case.outcome] += 1
            if (number + 1) % 250 == 0:
                print(f"after case {number}: {sum(ends.values())} cases, {bad} bad", flush=True)
            if not case.allowed:
                bad += 1
                print(f"{number}: {case.verb}, {case.name} {case.how}: {case.outcome}: {case.err[-600:]}", flush=True)
    for table in (ends, files):
        for (what, outcome), count in sorted(table.items()):
            print(f"{what:50} {outcome:20} {count:6}")
        print()
    print(f"{cases} cases, {bad} that ended in a way they should not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main_of_script(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
