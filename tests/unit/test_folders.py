"""Where tests stand: what they share is in tests/support, and tests/unit has the packages of the source."""

import ast

from tests.support.source import ROOT, SOURCE, text_of

TESTS = ROOT / "tests"


def imports_of(source: str) -> set[str]:
    """The modules under `tests` that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {
        f"{'.' * node.level}{node.module or ''}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name for name in plain | named if name.startswith((".", "tests.")) or name == "tests"}


def test_every_kind_of_import_is_seen():
    source = "from tests import one\ndef f():\n    import tests.two\n    from tests.three import four\nfrom .five import six\nimport os"
    assert imports_of(source) == {"tests.one", "tests.two", "tests.three.four", ".five.six"}


def test_test_files_import_from_support_and_not_from_each_other():
    found = {path.relative_to(ROOT).as_posix(): imports_of(text_of(path)) for path in TESTS.rglob("*.py")}
    assert any(found.values())
    assert not {(path, name) for path, names in found.items() for name in names if not name.startswith("tests.support.")}
    assert not list((TESTS / "support").glob("test_*.py"))


def test_the_folders_of_unit_tests_are_packages_of_the_source():
    folders = {path.name for path in (TESTS / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {"data", "training"} <= folders
    assert all((SOURCE / name / "__init__.py").exists() for name in folders), folders


def test_tests_of_loose_modules_are_beside_the_folders():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    loose = {path.stem.removeprefix("test_") for path in (TESTS / "unit").glob("test_*.py")}
    assert not loose & packages
