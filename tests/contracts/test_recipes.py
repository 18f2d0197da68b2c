"""Every cell of the tables: its recipe builds, fits and takes one step in `--quick` form, on synthetic images.

letKD-2 takes it at the data set's own size. The other rows take it at half of that, 64 at most, to keep the tests short: how their maps
pool and match at the full size is not seen here. Rows that vary another row or add a method to it take it for the pairs with a published
result, and for two more.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from letkd.data import Dataset, Split
from letkd.errors import UnsupportedPair
from letkd.models import create_model, save_weights
from letkd.recipes import list_methods, list_pairs, resolve
from letkd.report.paper import paper_result
from letkd.training import build, teachers
from letkd.training.optim import build_optimizer

pytestmark = pytest.mark.slow

C = 3
SIZES = {"digits": 32, "cifar100": 32, "tiny-imagenet": 64, "imagenet": 224}


@cache
def synthetic(name: str, size: int) -> Dataset:
    """Two images a class, of noise; fewer classes than the real data set has, so that each is seen."""
    images = torch.randint(256, (2 * C, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(images, torch.arange(C).repeat(2))
    none = split.subset(torch.arange(0))
    classes = tuple(f"class {c}" for c in range(C))
    return Dataset(name, split, none, none, classes=classes, mean=(0.5,) * 3, std=(0.25,) * 3, flip=True)


def test_every_data_set_has_its_size():
    assert {pair.partition("/")[0] for pair in list_pairs()} == set(SIZES)


@pytest.mark.parametrize("pair", list_pairs())
def test_every_cell_of_a_pair_takes_a_step(pair, tmp_path, monkeypatch):
    name = pair.partition("/")[0]
    recipe = resolve(pair, method="kd")
    teacher = create_model(recipe.teacher.model, num_classes=C)
    weights = tmp_path / "teacher.safetensors"
    save_weights(teacher, weights)

    monkeypatch.setattr(teachers, "create_model", lambda *name, **given: teacher)  # one for all rows: it is frozen
    dashes = []
    for method in rows_for(pair):
        given = {} if method == "teacher" else {"teacher.weights": str(weights)}
        small = {"data.batch_size": 2, "train.steps": 1}
        recipe = resolve(pair, method=method, overrides={**given, **small}, quick=True)
        try:
            data = synthetic(name, size_for(pair, method))
            take_a_step(recipe, data, tmp_path / f"supervision-{data.image_size[0]}")  # rows share what they fit
        except UnsupportedPair:
            dashes.append(method)
    assert set(dashes) <= {"fsp"}
    assert [method for method in dashes if paper_result(f"{pair}/{method}")] == []


def rows_for(pair: str) -> list[str]:
    """All rows for two pairs; for the others without the variants of a row, such as at-kd of at, that have no published result."""
    rows = list_methods()
    if pair in ("digits/tiny", "cifar100/rn56-rn20"):
        return rows
    variants = {row for row in rows for other in rows if row.startswith(f"{other}-")}
    return [row for row in rows if row not in variants or paper_result(f"{pair}/{row}")]


def size_for(pair: str, method: str) -> int:
    name = pair.partition("/")[0]
    whole = method == "letkd-2" or pair == "cifar100/rn50-mnv2"  # at half of it that pair's maps end in one pixel
    return SIZES[name] if whole else min(SIZES[name] // 2, 64)


def take_a_step(recipe, data: Dataset, folder: Path) -> None:
    distiller = build.build_distiller(recipe, data).train()
    build.fit(distiller, recipe, data, folder)
    optimizer = build_optimizer(distiller, recipe.optim)
    for group in optimizer.param_groups:
        group["lr"] = 1e-6  # with an untrained teacher's features the first phases of AB and FSP would blow up
    phases = [*(phase.weights for phase in recipe.phases), recipe.weights]
    for number, terms in enumerate(phases, start=1):
        distiller.set_weights(terms)
        batch = next(iter(build.train_loader(recipe, data)))
        assert batch.x.shape[1:] == (3, *data.image_size)
        step = distiller(batch)
        step.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(step.loss), f"{recipe.title}, phase {number}"
        assert step.logits.shape == (2, C)
        assert {name for name, weight in terms.items() if weight} <= step.terms.keys()
    assert all(torch.isfinite(parameter).all() for parameter in distiller.parameters()), recipe.title
