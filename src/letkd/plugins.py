"""Plugins: methods, models, data sets and recipes of other installed packages, found by their entry points.

    [project.entry-points."letkd.methods"]
    regress = "my_package.regress:Regress"

The groups are `letkd.methods`, `letkd.supervisions`, `letkd.models`, `letkd.data` and `letkd.recipes`. An installed package is trusted: its
code runs when a name of its group is first looked up.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from letkd.errors import LetkdError
from letkd.progress import say


@cache
def plugins(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, sorted by name; nothing is imported. Cached: a search reads the metadata of every package."""
    return tuple(sorted(entry_points(group=f"letkd.{group}"), key=lambda entry: entry.name))


Item = TypeVar("Item")


class Registry(Mapping[str, Item]):
    """Items by name: those that were added, and those of plugins, which are imported when the registry is first read.

    Args:
        group: group of the entry points, without `letkd.`.
        what: what an item is, for messages: "a model".
        check: called with a plugin's name and item; raises `LetkdError` if the item is not valid.
    """

    def __init__(self, group: str, what: str, check: Callable[[str, Any], None] = lambda name, item: None):
        self.group, self.what, self._check = group, what, check
        self._items: dict[str, Item] = {}
        self._loaded = False

    def add(self, name: str, item: Item) -> None:
        """Add an item; raises an error if another item has this name."""
        if self._items.get(name, item) is not item:
            module = getattr(self._items[name], "__module__", "another package")
            raise LetkdError(f"{self.what} {name!r} is already registered by {module}; choose another name")
        self._items[name] = item

    def remove(self, name: str) -> Item:
        """Remove an item and return it."""
        return self._items.pop(name)

    def _all(self) -> dict[str, Item]:
        if not self._loaded:
            self._loaded = True  # before loading: a plugin may read the registry while it is imported
            for entry in plugins(self.group):
                self._load(entry)
        return self._items

    def _load(self, entry: EntryPoint) -> None:
        """Load a plugin; one that fails is left out, and a message says why."""
        try:
            item = entry.load()
            self._check(entry.name, item)
            self.add(entry.name, item)
        except LetkdError as error:
            _left_out(entry, str(error))
        except Exception as error:  # code of another package can raise any error
            _left_out(entry, f"{type(error).__name__}: {error}")

    def __getitem__(self, name: str) -> Item:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@cache
def plugin_recipes() -> dict[str, Path]:
    """Recipe files by row name, from the packages in the group `letkd.recipes`: every valid `NAME.toml` in such a package is a row."""
    found: dict[str, Path] = {}
    for entry in plugins("recipes"):
        folders = _folders(entry)
        if not folders:
            _left_out(entry, f"{entry.value} is not an installed package")
        for path in (path for folder in folders for path in sorted(Path(folder).glob("*.toml"))):
            try:
                tomllib.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError, OSError) as error:
                _left_out(entry, f"{path.name} is not a valid TOML file: {error}")
            else:
                found[path.stem] = path
    return found


def _folders(entry: EntryPoint) -> list[str]:
    """Where the package of an entry point is; empty if it is not installed."""
    try:
        spec = find_spec(entry.value)
    except (ImportError, ValueError):  # of the package that contains it
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def _left_out(entry: EntryPoint, why: str) -> None:
    package = entry.dist.name if entry.dist else "an unknown package"
    say(f"the plugin {entry.name!r} of {package} ({entry.group}) was left out: {why}")
