"""docs/deviations.md: no number is missing or dangling, every option exists, and every default is as the page says."""

import inspect
import re
import tomllib
from typing import Any

import pytest
from typer.main import get_command

import letkd
from letkd.cli.main import app
from letkd.recipes import HERE
from tests.support.source import ROOT, SETTING, SOURCE, missing, text_of, value_at, with_setting

PAGE = ROOT / "docs" / "deviations.md"
LABELS = ["Paper", "Authors' code", "letkd", "Option", "Evidence"]
FROM_THE_FACTS = 25  # where paper and authors' code differ; what follows is open points and departures of our own

ARGUMENT = re.compile(r"`([A-Za-z]\w*)\((\w+)=([^`)]*)\)`")
COMMAND = re.compile(r"`letkd (\w+) (--[\w-]+)`")


def entries() -> dict[int, dict[str, str]]:
    """number -> label -> text."""
    found = {}
    for number, body in re.findall(r"^## D(\d+)\. \S.*?$(.*?)(?=^## |\Z)", text_of(PAGE), re.M | re.S):
        parts = re.findall(r"^- \*\*(.+?)\*\*: (.*?)(?=^- \*\*|\Z)", body, re.M | re.S)
        assert [label for label, _ in parts] == LABELS, f"D{number}"
        found[int(number)] = {label: " ".join(text.split()) for label, text in parts}
    return found


ENTRIES = entries()
every_entry = pytest.mark.parametrize("number", ENTRIES, ids=lambda number: f"D{number}")


def argument(owner: str, name: str) -> inspect.Parameter:
    """The argument of something public, found in `letkd` or `letkd.methods`."""
    made = getattr(letkd, owner, None) or getattr(letkd.methods, owner)
    return inspect.signature(made).parameters[name]


def literal(text: str) -> Any:
    return {"True": True, "False": False, "None": None}[text] if text in ("True", "False", "None") else toml(text)


def toml(text: str) -> Any:
    return tomllib.loads(f"value = {text}")["value"]


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_numbers_are_consecutive_from_1():
    numbers = [int(n) for n in re.findall(r"^## D(\d+)\.", text_of(PAGE), re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) == list(ENTRIES)
    assert len(numbers) > FROM_THE_FACTS
    titles = re.findall(r"^## D\d+\. (.+)$", text_of(PAGE), re.M)
    assert len(set(titles)) == len(numbers)


@every_entry
def test_every_part_of_an_entry_says_something(number):
    assert all(re.search(r"\w", text) for text in ENTRIES[number].values())


def test_every_number_mentioned_is_on_the_page():
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.toml"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    mentioned = {(path.name, int(n)) for path in files for n in re.findall(r"\bD(\d+)\b", text_of(path))}
    assert {n for _, n in mentioned} <= ENTRIES.keys(), mentioned
    in_source = {n for name, n in mentioned if not name.endswith(".md")}
    assert {3, 4, 17, 21} <= in_source


@every_entry
def test_the_defaults_are_as_the_page_says(number):
    text = ENTRIES[number]["letkd"]
    for owner, name, value in ARGUMENT.findall(text):
        assert argument(owner, name).default == literal(value), name
    for method, setting in SETTING.findall(text):
        key, _, value = setting.partition(" = ")
        if method == "base":
            held = value_at(tomllib.loads(text_of(HERE / "base.toml")), key)
        else:
            held = with_setting(setting, method or "letkd-2")[2]
        assert held == toml(value), key


@every_entry
def test_the_options_exist_and_are_not_the_default(number):
    text = ENTRIES[number]["Option"]
    arguments, settings, commands = ARGUMENT.findall(text), SETTING.findall(text), COMMAND.findall(text)
    assert arguments or settings or commands or text.startswith(("none", "other taps")), text
    for owner, name, value in arguments:
        parameter = argument(owner, name)
        assert not value or parameter.default != literal(value), name
    for method, setting in settings:
        _, value, before = with_setting(setting, method or "letkd-2")
        assert as_list(value) == toml(setting.partition(" = ")[2]) != as_list(before), setting
    for verb, option in commands:
        known = [name for parameter in get_command(app).commands[verb].params for name in parameter.opts]
        assert option in known


def test_the_code_and_the_tests_named_exist():
    assert not missing(PAGE)


def test_every_option_is_written_so_that_it_is_checked():
    """Spans in backticks that look like an option must be of a form that the tests above read."""
    forms = (ARGUMENT, SETTING, COMMAND)
    spans = [span for entry in ENTRIES.values() for span in re.findall(r"`[^`]+`", entry["letkd"] + entry["Option"])]
    options = [span for span in spans if "=" in span or "--" in span]
    assert len(options) > FROM_THE_FACTS
    assert not [span for span in options if not any(form.fullmatch(span) for form in forms)]
