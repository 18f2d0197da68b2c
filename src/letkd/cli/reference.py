"""The page docs/commands.md: every command and option, generated from the command line."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

HEAD = """# Commands

Generated from the command line by `python -m letkd.cli.reference > docs/commands.md`; do not edit by hand. `letkd COMMAND --help` prints
the same.

Exit codes: 0 done; 2 wrong input (explained in one sentence); 75 stopped (run the same command again to resume);
130 stopped at once; 1 unexpected error.
"""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The command and its sub-commands, by what the user types."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")
    else:
        yield path, command


def as_markdown() -> str:
    """The whole page."""
    from letkd.cli.main import app

    text = HEAD
    for path, command in commands(typer.main.get_command(app), "letkd"):
        arguments = [item for item in command.params if item.param_type_name == "argument"]
        options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
        usage = " ".join([path, *map(_usage, arguments), *(["[OPTIONS]"] if options else [])])
        paragraphs = (command.help or "").strip().split("\n\n")
        text += f"\n## {path}\n\n```text\n{usage}\n```\n\n" + "\n\n".join(" ".join(one.split()) for one in paragraphs) + "\n"
        hints = get_type_hints(inspect.unwrap(command.callback))
        rows = [(f"`{_name(item)}`", item) for item in arguments]
        rows += [(_option(item, _choices(hints.get(item.name))), item) for item in options]
        if rows:
            text += "\n| | |\n| --- | --- |\n"
        for name, item in rows:
            described = " ".join((getattr(item, "help", None) or "").split()) + _default(item)
            text += f"| {name} | {described.replace('|', chr(92) + '|')} |\n"
    return text


def _name(item: Any) -> str:
    if item.metavar is None:
        return item.name.upper().replace("_", "-")
    return item.metavar.strip("[].…") if item.param_type_name == "argument" else item.metavar


def _usage(item: Any) -> str:
    """An argument as shown in a usage line."""
    name = _name(item) + ("..." if item.nargs == -1 else "")
    return name if item.required else f"[{name}]"


def _option(item: Any, choices: tuple[str, ...]) -> str:
    names = ", ".join(f"`{name}`" for name in [*item.opts, *item.secondary_opts])
    value = " or ".join(choices) or _name(item).replace("|", " or ")  # a | would end the cell, even in code
    return names if item.is_flag else f"{names} `{value}`"


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of an option that has a fixed set of them."""
    found = next((part for part in (hint, *get_args(hint)) if get_origin(part) is Literal), None)
    return get_args(found)


def _default(item: Any) -> str:
    value = item.default
    if item.param_type_name == "option" and isinstance(item.show_default, str):
        text = item.show_default
        return f" Default: `{text}`." if "<" in text else f" Default: {text}."  # outside of code, <cell> would be an HTML tag
    if item.param_type_name != "option" or value is None or callable(value) or isinstance(value, bool) or value == ():
        return ""
    return f" Default: `{value}`."


if __name__ == "__main__":
    print(as_markdown(), end="")
