"""What a network's own file imports from its folder. Files of the same name in other folders are other modules."""

import hashlib
import os
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

PREFIX = "letkd_own_"  # of the names in `sys.modules` that are letkd's


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Within `with`, files in `folder` can be imported by name, as in `python folder/file.py`; afterwards they cannot.

    Imported modules are kept: a later `with` for the same folder finds them. In between they have names that no other folder has, so that
    their classes and functions can be pickled, inspected and compiled. A file in the folder is preferred to another file of the same name,
    unless that belongs to Python or to an installed package.
    """
    with _LOCK:
        own = _FOLDERS.setdefault(place := os.path.realpath(folder), _Folder(place, [place]))
        if _OPEN:  # a file that builds a network from another file
            _OPEN[-1].leave()
        _OPEN.append(own)
        own.enter()
        try:
            yield
        finally:
            _OPEN.pop().leave()
            if _OPEN:
                _OPEN[-1].enter()


@dataclass
class _Folder:
    """A folder and what its files imported.

    Args:
        path: the folder.
        searched: the folder, and the folders that its files added to `sys.path`.
        modules: by the names that its files import them by.
        hidden: other modules of these names, while the folder's files run.
        outside: `sys.modules` and `sys.path` as the rest of the program sees them.
    """

    path: str
    searched: list[str]
    modules: dict[str, ModuleType] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    outside: tuple[dict[str, ModuleType], list[str]] = field(default_factory=lambda: ({}, []))

    def enter(self) -> None:
        self.outside = dict(sys.modules), list(sys.path)
        self.hidden = self._hides()
        for name in self.hidden:
            del sys.modules[name]
        for name, module in self.modules.items():
            module.__name__ = name
            sys.modules[name] = module
        installed = [entry for entry in sys.path if _is_installed(entry)]
        sys.path[:] = [*installed, *self.searched, *(entry for entry in sys.path if not _is_installed(entry))]

    def leave(self) -> None:
        modules, path = self.outside
        added = [entry for entry in sys.path if entry not in path and entry not in self.searched]
        self.searched += [entry for entry in added if not _is_installed(entry)]
        own = self._found(modules, path)
        for name in own:
            del sys.modules[name]
        self.modules |= own
        sys.modules.update({name: modules[name] for name in [*self.hidden, *self.modules] if name in modules})
        sys.path[:] = [*filter(_is_installed, added), *path]
        self._rename()

    def _hides(self) -> list[str]:
        """Names of loaded modules that the folder's files must not get, because the folder has modules of these names."""
        searched = set(map(os.path.realpath, self.searched))
        names = {found.name for found in pkgutil.iter_modules(self.searched)} - {"letkd", "__main__"}
        places = {name: _place(sys.modules[name]) for name in names & sys.modules.keys()}
        others = {name for name, place in places.items() if not (place is None or place in searched or _is_installed(place))}
        return [name for name in list(sys.modules) if name.partition(".")[0] in others]

    def _found(self, before: dict[str, ModuleType], path: list[str]) -> dict[str, ModuleType]:
        """Modules that were imported since `enter` and that others could not import."""
        searched = set(map(os.path.realpath, self.searched)) - set(map(os.path.realpath, path))
        new = {name: module for name, module in dict(sys.modules).items() if before.get(name) is not module}
        own = {name for name in new if not ("." in name or name.startswith(PREFIX)) and _place(new[name]) in searched}
        return {name: module for name, module in new.items() if name.partition(".")[0] in own}

    def _rename(self) -> None:
        package = f"{PREFIX}folder_{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}"
        if self.modules:
            sys.modules.setdefault(package, ModuleType(package))
        for name, module in self.modules.items():
            module.__name__ = f"{package}.{name}"
            sys.modules[module.__name__] = module
            _tell(module, name, module.__name__)


_FOLDERS: dict[str, _Folder] = {}
_OPEN: list[_Folder] = []
_LOCK = threading.RLock()


def _tell(holder: ModuleType | type, before: str, now: str) -> None:
    """Set the module's new name in its classes and functions, where pickle reads it."""
    for value in list(vars(holder).values()):
        if isinstance(value, type | FunctionType) and value.__module__ == before:
            with suppress(AttributeError, TypeError):  # a class written in C
                value.__module__ = now
                if isinstance(value, type):
                    _tell(value, before, now)


def _place(module: ModuleType) -> str | None:
    """The folder that a module or package is in; None for a module without a file."""
    known = vars(module) if isinstance(module, ModuleType) else {}
    where = next(iter(known.get("__path__") or ()), None) or known.get("__file__")
    return os.path.realpath(os.path.dirname(where)) if isinstance(where, str) and os.path.isabs(where) else None


def _is_installed(folder: str) -> bool:
    """Whether a folder is that of Python's own modules or of installed packages."""
    place, python = Path(os.path.realpath(folder)), os.path.realpath(os.path.dirname(os.__file__))
    return not {"site-packages", "dist-packages"}.isdisjoint(place.parts) or place.is_relative_to(python)
