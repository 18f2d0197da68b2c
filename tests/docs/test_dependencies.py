"""What the package imports is what it declares: nothing is there only because the developers' environment has it."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "letkd"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {
    "scikit-learn": "sklearn",
    "faiss-cpu": "faiss",
    "pillow": "PIL",
    "lightning-fabric": "lightning_fabric",
    "mlflow-skinny": "mlflow",
}
NEVER_IMPORTED = {"onnxscript"}  # torch's exporter does


def imported_as(requirements: list[str]) -> set[str]:
    names = {re.match(r"[\w-]+", text)[0] for text in requirements}
    return {NAMES.get(name, name.replace("-", "_")) for name in names}


CORE = imported_as(PROJECT["dependencies"])
EXTRAS = imported_as(
    [text for name, extra in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs") for text in extra]
)


def imports(path: Path) -> list[tuple[str, bool]]:
    """The top-level packages that a file imports, each with whether that happens as soon as the file is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], node not in later) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(((node.module or "").partition(".")[0], node not in later))
    return [(name, at_once) for name, at_once in found if name not in sys.stdlib_module_names and name != "letkd"]


@cache
def all_imports() -> dict[tuple[str, bool], Path]:
    return {(name, at_once): path for path in SOURCE.rglob("*.py") for name, at_once in imports(path)}


def test_the_core_imports_only_what_it_declares():
    undeclared = {f"{path.name}: {name}" for (name, at_once), path in all_imports().items() if at_once and name not in CORE}
    assert not undeclared
    assert not {"torchvision", "timm", "transformers", "onnx"} & {name for name, at_once in all_imports() if at_once}


def test_what_functions_import_is_declared_at_least_as_an_extra():
    assert not {f"{path.name}: {name}" for (name, _), path in all_imports().items() if name not in CORE | EXTRAS}


def test_nothing_is_declared_in_vain():
    used = {name for name, _ in all_imports()}
    assert not CORE - used
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert not {name for name in EXTRAS - used - NEVER_IMPORTED if not re.search(rf"\b{name}\b", text)}
