"""The examples in docstrings are true, and the names that people meet first have one."""

import doctest
import importlib
import pkgutil

import pytest

import letkd

MODULES = [
    name
    for _, name, is_package in pkgutil.walk_packages(letkd.__path__, "letkd.")
    if not is_package and not name.endswith("__main__") and not name.startswith("letkd.cli")
]
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples(module) -> list[doctest.DocTest]:
    return [test for test in FINDER.find(module) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in examples(importlib.import_module(name)):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize(
    "thing",
    [
        *(
            letkd.KDLayer,
            letkd.soft_match,
            letkd.Distiller,
            letkd.create_model,
            letkd.find_taps,
            letkd.load_student,
            letkd.graft,
        ),
        *(letkd.KMeansSupervision, letkd.SubclassSupervision, letkd.methods.letkd1, letkd.methods.letkd2),
    ],
    ids=lambda thing: thing.__name__,
)
def test_the_main_names_have_an_example(thing):
    assert doctest.DocTestParser().get_examples(thing.__doc__)
