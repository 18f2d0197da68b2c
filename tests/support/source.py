"""The source and the documentation as texts: the packages of the contract, the places that a page names, and whether they exist."""

import ast
import configparser
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from letkd.methods import METHODS
from letkd.recipes import Recipe, resolve

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "letkd"
LAYERS = "importlinter:contract:layers"
PAIR = "cifar100/rn56-rn20"

CODE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml)): ([\w.]+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SETTING = re.compile(r"`(?:([\w-]+): )?([a-z]\w*(?:\.[\w/]+)+ = [^`]+)`")


def layers() -> list[str]:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter", encoding="utf-8")
    return [line.replace(" ", "") for line in contract[LAYERS]["layers"].split("\n") if line.strip()]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Functions and classes of a file by their qualified name."""
    found: dict[str, ast.AST] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = child
                walk(child, f"{prefix}{child.name}.")

    walk(ast.parse(text_of(path)), "")
    return found


def missing(page: Path) -> list[str]:
    """The code, tests, cells and settings that a page names and that are not there."""
    text, wrong = text_of(page), []
    for file, name in CODE.findall(text):
        path = SOURCE / file
        if not path.exists():
            wrong.append(file)
        elif path.suffix == ".toml":
            if value_at(tomllib.loads(text_of(path)), name) is None:
                wrong.append(f"{file}: {name}")
        elif name not in definitions(path):
            wrong.append(f"{file}: {name}")
    for file, name in TEST.findall(text):
        if not (ROOT / file).exists() or name not in definitions(ROOT / file):
            wrong.append(f"{file}::{name}")
    return wrong


def value_at(table: Any, key: str) -> Any:
    """The value under a dotted key of a recipe or of a table; None where there is none."""
    for part in key.split("."):
        table = table.get(part) if isinstance(table, dict) else getattr(table, part, None)
    return table


def with_setting(setting: str, method: str) -> tuple[Recipe, Any, Any]:
    """The recipe with a `key = value`, the value it then has there, and the one it had; refused keys raise."""
    key = setting.partition(" = ")[0]
    before = resolve(f"{PAIR}/{method}")
    after = resolve(f"{PAIR}/{method}", settings=[setting])
    for name, table in after.methods.items():
        METHODS[name].from_recipe(table)
    return after, value_at(after, key), value_at(before, key)
