"""What a cache of the teacher must store for several methods."""

from collections.abc import Container, Iterable

from letkd.errors import LetkdError
from letkd.methods.base import Lessons, Method


def combined_lessons(methods: Iterable[Method], active: Iterable[Method], unused: Container[str]) -> Lessons:
    """The lessons of all `active` methods without those of `unused` terms; an error if one of `methods` cannot learn from a cache."""
    methods = list(methods)
    if names := [repr(method.name) for method in methods if method.two_views]:
        raise LetkdError(
            f"a cache of the teacher stores one view of every image per epoch, but {', '.join(names)} needs two; train without the "
            "cache (omit --cache, train.cache_views)"
        )
    if maps := [repr(method.name) for method in methods if method.lessons() is None]:
        raise LetkdError(
            f"a cache of the teacher stores labels, logits and pooled features, but {', '.join(maps)} needs whole maps; "
            "train without the cache (omit --cache, train.cache_views)"
        )
    parts = [lessons for method in active if (lessons := method.lessons()) is not None]
    vectors = dict.fromkeys(role for part in parts for role in part.vectors)
    labels = {site: fitting for part in parts for site, fitting in part.labels.items() if fitting.term not in unused}
    return Lessons(tuple(vectors), labels)
