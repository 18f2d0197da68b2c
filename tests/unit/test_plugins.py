"""Entry points of installed packages."""

from importlib.metadata import EntryPoint

import pytest

from letkd import plugins
from letkd.errors import RecipeError
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


def test_recipes_of_a_plugin_that_cannot_be_read_are_left_out(tmp_path, monkeypatch, said):
    (tmp_path / "somebodys").mkdir()
    for name, text in {"bad": "title = ", "odd": 'like = "nope"', "itself": 'like = "itself"', "good": 'like = "kd"'}.items():
        (tmp_path / "somebodys" / f"{name}.toml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"a": "somebodys", "b": "removed.recipes"}
    entries = lambda group: [EntryPoint(*item, group) for item in values.items()] if "recipes" in group else []  # noqa: E731
    monkeypatch.setattr(plugins, "entry_points", entries)
    for cached in (plugins.plugins, plugins.plugin_recipes):
        cached.cache_clear()
    try:
        assert resolve("digits/tiny/good").methods == resolve("digits/tiny/kd").methods
        text = said()
        assert "(letkd.recipes) was left out: bad.toml is not a valid TOML file" in text
        assert "(letkd.recipes) was left out: removed.recipes is not an installed package" in text
        for name, like in {"odd": "nope", "itself": "itself"}.items():
            with pytest.raises(RecipeError, match=f"{name}.toml: 'like' is '{like}', which is not another method"):
                resolve(f"digits/tiny/{name}")
    finally:
        for cached in (plugins.plugins, plugins.plugin_recipes):
            cached.cache_clear()
