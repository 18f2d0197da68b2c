"""`train.cache_views = "auto"`: a third of the epochs, at most ten."""

import pytest

from letkd.errors import RecipeError
from letkd.recipes import derived_values, resolve, resolve_with_sources

AUTO = "train.cache_views=auto"


@pytest.mark.parametrize(("epochs", "views"), [(1, 1), (3, 1), (4, 2), (12, 4), (30, 10), (240, 10)])
def test_automatic_views_are_a_third_of_the_epochs(epochs, views):
    assert resolve("digits/tiny/kd", settings=[AUTO, f"epochs={epochs}"]).train.cache_views == views


def test_a_number_of_views_is_kept_and_the_last_word_counts():
    assert resolve("digits/tiny/kd", settings=["cache_views=7", "epochs=12"]).train.cache_views == 7
    assert resolve("digits/tiny/kd", overrides={"train.cache_views": "auto"}, settings=["cache_views=7"]).train.cache_views == 7
    assert resolve("digits/tiny/kd", settings=["epochs=12"]).train.cache_views is None


def test_the_number_is_told():
    recipe, sources = resolve_with_sources("digits/tiny/kd", preset="fast", settings=[AUTO])
    assert derived_values(recipe, sources) == [
        "train.cache_views = 4 (a third of the epochs (12), at most 10); set train.cache_views to choose another number"
    ]


def test_other_words_are_refused():
    with pytest.raises(RecipeError, match=r"'train\.cache_views' is 'some'"):
        resolve("digits/tiny/kd", settings=["cache_views=some"])
    with pytest.raises(RecipeError, match=r"'train\.epochs' is 'many'"):
        resolve("digits/tiny/kd", settings=[AUTO, "train.epochs=many"])
