"""Entry points of installed packages."""

from importlib.metadata import EntryPoint

import pytest

from letkd import plugins
from letkd.recipes import resolve


@pytest.fixture
def searches(monkeypatch):
    """The groups that are searched for in the installed packages, which have two plugins each."""
    asked = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint(name, "json", group) for name in ("two", "one")]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    for cached in (plugins.plugins, plugins.plugin_recipes):
        cached.cache_clear()
    yield asked
    for cached in (plugins.plugins, plugins.plugin_recipes):
        cached.cache_clear()


def test_installed_packages_are_searched_once_per_group(searches):
    assert [entry.name for entry in plugins.plugins("models")] == ["one", "two"]
    assert plugins.plugins("models") is plugins.plugins("models")
    resolve("digits/tiny/kd")
    resolve("digits/tiny/letkd-2")
    assert len(searches) == len(set(searches))
    assert {"letkd.models", "letkd.recipes"} <= set(searches)
