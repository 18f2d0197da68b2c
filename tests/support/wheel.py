"""What `pip install letkd` gives: `python -m tests.support.wheel WHEEL` installs a wheel into an empty environment and uses it there.

The environment holds the wheel alone. Its dependencies are those of the environment that runs this script, added at the end of the path
without the development install of letkd, which is a matter of minutes less; that they are the declared ones is tests/docs/
test_dependencies.py, and that their versions are within the declared bounds is looked at here.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "letkd"

LOOK = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement
import letkd
wrong = []
for text in metadata.requires("letkd"):
    need = Requirement(text)
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        if not need.specifier.contains(metadata.version(need.name), prereleases=True):
            wrong.append(text)
print(json.dumps({"file": letkd.__file__, "version": metadata.version("letkd"), "path": sys.path, "wrong": wrong}))
"""
USE = """
import torch, letkd
model = letkd.load_student("run/student.safetensors")
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
print("student opened")
"""


def main(wheel: Path) -> None:
    check_content(wheel)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "venv")
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel.resolve())], check=True)
        (site,) = home.glob("lib/python*/site-packages")
        # A path in a .pth file is added, but .pth files inside it are not read: the development install stays out.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
            return done.stdout

        found = json.loads(run(str(python), "-c", LOOK))
        must(Path(found["file"]).is_relative_to(site), f"letkd was imported from {found['file']}, and not from the wheel")
        must(str(ROOT / "src") not in found["path"], "the source folder is on the path")
        must(not found["wrong"], f"declared and not there in such a version: {found['wrong']}")
        letkd = str(home / "bin" / "letkd")
        must(run(letkd, "--version").strip() == found["version"], "--version is not the wheel's")
        must("cifar100/rn56-rn20/letkd-2" in run(letkd, "list"), "`letkd list` lacks a cell")
        must("methods.letkd" in run(letkd, "show", "cifar100/rn56-rn20/letkd-2"), "`letkd show` lacks a value")
        must("run folder: run" in run(letkd, "train", "digits/tiny/ce", "--quick", "--out", "run"), "`letkd train` failed")
        run(letkd, "report", "run")
        must("<html" in Path(folder, "run", "report.html").read_text(encoding="utf-8"), "there is no report")
        must("student opened" in run(str(python), "-c", USE), "the student does not open")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB, installed and used in an empty environment")


def check_content(wheel: Path) -> None:
    """Every file of the package is in the wheel, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name.removeprefix("letkd/") for name in archive.namelist() if ".dist-info/" not in name}
    there = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package = {path.relative_to(SOURCE).as_posix() for path in there}
    must(inside == package, f"wheel and source differ in {sorted(inside ^ package)}")
    for name in (
        "recipes/base.toml",
        "report/paper_results.toml",
        "report/published_results.toml",
        "report/assets/page.html",
        "report/assets/page.css",
    ):
        must(name in inside, f"the wheel lacks {name}")


def must(true: bool, otherwise: str) -> None:
    if not true:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
