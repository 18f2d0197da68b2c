"""What holds of every loader, whatever the numbers: an epoch is a permutation, and (seed, epoch) says which."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from letkd.data import (
    Augment,
    Chain,
    CropFlip,
    Erase,
    Loader,
    Mix,
    RandAugment,
    ResizedCropFlip,
    RotateFlip,
    Split,
    Strong,
    TrivialAugment,
)
from letkd.data.base import stratified
from letkd.data.loader import normalise
from letkd.errors import DataError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def a_split(n: int, C: int = 5) -> Split:
    g = torch.Generator().manual_seed(n)
    return Split(torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=g), torch.randint(C, (n,), generator=g))


def batches(n: int, b: int, epoch: int = 1, **options):
    loader = Loader(a_split(n), b, mean=MEAN, std=STD, **options)
    loader.set_epoch(epoch)
    return list(loader)


def same(one, two) -> bool:
    return len(one) == len(two) and all(
        torch.equal(p.x, q.x)
        and torch.equal(p.y, q.y)
        and torch.equal(p.index, q.index)
        and p.epoch == q.epoch
        and p.lam == q.lam
        and (p.y2 is q.y2 is None or torch.equal(p.y2, q.y2))
        for p, q in zip(one, two, strict=True)
    )


sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)
epochs = st.integers(1, 500)


@settings(deadline=None, max_examples=60)
@given(n=sizes, b=st.integers(1, 70), seed=seeds, epoch=epochs, shuffle=st.booleans())
def test_every_image_once_an_epoch_with_its_own_label_and_pixels(n, b, seed, epoch, shuffle):
    split = a_split(n)
    got = batches(n, b, epoch, seed=seed, shuffle=shuffle)
    index = torch.cat([batch.index for batch in got])
    assert sorted(index.tolist()) == list(range(n))
    assert shuffle or index.tolist() == list(range(n))
    assert len(got) == len(Loader(split, b, mean=MEAN, std=STD))
    assert [len(batch.y) for batch in got[:-1]] == [b] * (len(got) - 1)
    for batch in got:
        assert batch.epoch == epoch
        assert torch.equal(batch.y, split.labels[batch.index])
        assert torch.equal(batch.x, normalise(split.images[batch.index], MEAN, STD))


@settings(deadline=None, max_examples=40)
@given(n=sizes, b=st.integers(1, 60), seed=seeds)
def test_drop_last_gives_whole_batches_only(n, b, seed):
    if b > n:
        with pytest.raises(DataError, match=f"would leave out all {n} images"):
            batches(n, b, drop_last=True)
        return
    got = batches(n, b, seed=seed, shuffle=True, drop_last=True)
    assert [len(batch.y) for batch in got] == [b] * (n // b)
    assert len(set(torch.cat([batch.index for batch in got]).tolist())) == n // b * b


@settings(deadline=None, max_examples=30)
@given(seed=seeds, epoch=epochs)
def test_same_seed_and_epoch_same_batches_whatever_the_global_generators_do(seed, epoch):
    options = {"seed": seed, "shuffle": True, "augment": CropFlip()}
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    one = batches(40, 16, epoch, **options)
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    state = torch.get_rng_state()
    assert same(one, batches(40, 16, epoch, **options))
    assert torch.equal(state, torch.get_rng_state())


@settings(deadline=None, max_examples=30)
@given(seed=seeds, epoch=epochs)
def test_another_epoch_or_seed_gives_another_order_and_other_crops(seed, epoch):
    options = {"shuffle": True, "augment": CropFlip()}
    for other in (batches(40, 40, epoch + 1, seed=seed, **options), batches(40, 40, epoch, seed=seed + 1, **options)):
        this = batches(40, 40, epoch, seed=seed, **options)
        assert not torch.equal(this[0].index, other[0].index)
        assert not torch.equal(this[0].x[this[0].index.argsort()], other[0].x[other[0].index.argsort()])


policies = [Chain((CropFlip(), RandAugment(), Erase(0.5))), Chain((ResizedCropFlip(), TrivialAugment())), Erase(0.5)]
augments = st.sampled_from([None, Augment(), CropFlip(), RotateFlip(), ResizedCropFlip(), *policies])
mixes = st.sampled_from([None, Mix("mixup"), Mix("cutmix", 0.5)])


@settings(deadline=None, max_examples=60)
@given(
    n=sizes,
    b=st.integers(1, 20),
    epoch=epochs,
    augment=augments,
    mix=mixes,
    shuffle=st.booleans(),
    drop=st.booleans(),
    data=st.data(),
)
def test_an_epoch_begun_later_goes_on_as_the_whole_one(n, b, epoch, augment, mix, shuffle, drop, data):
    options = {"augment": augment, "mix": mix, "shuffle": shuffle, "drop_last": drop, "seed": 3}
    loader = Loader(a_split(n), min(b, n), mean=MEAN, std=STD, **options)
    loader.set_epoch(epoch)
    whole = list(loader)
    start = data.draw(st.integers(0, len(whole)))
    loader.set_epoch(epoch, start=start)
    assert same(whole[start:], list(loader))
    assert len(loader) == len(whole)
    loader.set_epoch(epoch)
    assert same(whole, list(loader))


@settings(deadline=None, max_examples=60)
@given(
    n=sizes,
    b=st.integers(1, 20),
    world=st.integers(1, 5),
    epoch=epochs,
    augment=augments,
    mix=mixes,
    drop=st.booleans(),
    start=st.integers(0, 1),
)
def test_the_parts_of_all_processes_make_up_the_one_process_batch(n, b, world, epoch, augment, mix, drop, start):
    options = {
        "mean": MEAN,
        "std": STD,
        "augment": augment,
        "mix": mix,
        "shuffle": True,
        "drop_last": drop and b <= n,
        "seed": 7,
    }
    if world > b:
        with pytest.raises(DataError, match=f"batch_size={b} for {world} processes"):
            Loader(a_split(n), b, rank=0, world=world, **options)
        return
    alone = Loader(a_split(n), b, **options)
    ranks = [Loader(a_split(n), b, rank=rank, world=world, **options) for rank in range(world)]
    for loader in (alone, *ranks):
        loader.set_epoch(epoch, start=min(start, len(loader)))
    walks = [list(loader) for loader in ranks]
    assert {len(walk) for walk in walks} == {len(list(alone))}
    for batch, *parts in zip(alone, *walks, strict=True):
        assert torch.equal(batch.x, torch.cat([part.x for part in parts]))
        assert torch.equal(batch.y, torch.cat([part.y for part in parts]))
        assert torch.equal(batch.index, torch.cat([part.index for part in parts]))
        assert mix is None or torch.equal(batch.y2, torch.cat([part.y2 for part in parts]))
        assert {part.lam for part in parts} == {batch.lam}
        counts = [len(part.y) for part in parts]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)
        assert min(counts) > 0 or len(batch.y) < world


def test_a_process_without_a_part_of_the_last_batch_gets_it_empty():
    last = [list(Loader(a_split(9), 8, mean=MEAN, std=STD, rank=rank, world=3))[-1] for rank in range(3)]
    assert [len(batch.y) for batch in last] == [1, 0, 0]
    assert last[2].x.shape == (0, 3, 8, 8)


def test_wrong_ranks_and_starts():
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(DataError, match=f"rank={rank} of world={world}: ranks count from 0"):
            Loader(a_split(4), 2, mean=MEAN, std=STD, rank=rank, world=world)
    loader = Loader(a_split(4), 2, mean=MEAN, std=STD)
    for start in (3, -1):
        with pytest.raises(DataError, match=f"start at batch {start} of an epoch, which has 2"):
            loader.set_epoch(1, start=start)


@settings(deadline=None, max_examples=40)
@given(
    n=sizes, b=st.integers(2, 20), seed=seeds, views=st.integers(1, 4), epoch=epochs, augment=augments, world=st.integers(1, 2)
)
def test_a_fixed_view_of_an_image_depends_on_nothing_but_view_and_image(n, b, seed, views, epoch, augment, world):
    def shown(epoch: int, **options) -> torch.Tensor:
        x = torch.full((n, 3, 8, 8), torch.nan)
        parts = [Loader(a_split(n), mean=MEAN, std=STD, augment=augment, rank=r, world=world, **options) for r in range(world)]
        for loader in parts:
            loader.set_epoch(epoch)
            for batch in loader:
                assert batch.view == (epoch - 1) % views
                x[batch.index] = batch.x
        return x

    one = shown(epoch, batch_size=b, seed=seed, shuffle=True, views=views)
    assert torch.equal(one, shown(epoch + views, batch_size=b + 1, seed=seed + 1, shuffle=True, views=views))
    loader = Loader(a_split(n), 5, mean=MEAN, std=STD, augment=augment, views=7)
    index = torch.randperm(n)
    for batch in loader.of_view((epoch - 1) % views, index):
        assert torch.equal(batch.x, one[batch.index])


def test_views_differ_and_the_order_is_still_drawn_anew_every_epoch():
    options = {"seed": 3, "shuffle": True, "augment": CropFlip(), "views": 2}
    first, second, third = (batches(40, 40, epoch, **options)[0] for epoch in (1, 2, 3))
    assert not torch.equal(first.index, third.index)
    assert not torch.equal(first.x[first.index.argsort()], second.x[second.index.argsort()])
    assert torch.equal(first.x[first.index.argsort()], third.x[third.index.argsort()])
    assert batches(4, 4)[0].view is None
    with pytest.raises(DataError, match="views=-1: the number of fixed views must be"):
        batches(4, 4, views=-1)


def test_the_order_does_not_depend_on_the_augmentation():
    plain, augmented = (batches(40, 7, seed=5, shuffle=True, augment=a) for a in (None, CropFlip()))
    assert all(torch.equal(p.index, q.index) for p, q in zip(plain, augmented, strict=True))
    assert not any(torch.equal(p.x, q.x) for p, q in zip(plain, augmented, strict=True))


def test_two_walks_at_once_do_not_disturb_each_other():
    loader = Loader(a_split(20), 4, mean=MEAN, std=STD, shuffle=True, augment=CropFlip())
    alone = list(loader)
    first, second = zip(*((p, q) for p, q in zip(loader, loader, strict=True)), strict=True)
    assert same(alone, first)
    assert same(alone, second)


def test_an_epoch_named_during_a_walk_is_for_the_next_walk():
    loader = Loader(a_split(20), 4, mean=MEAN, std=STD, shuffle=True)
    expected = list(loader)
    walk = iter(loader)
    loader.set_epoch(9)
    assert same(expected, list(walk))
    assert {batch.epoch for batch in loader} == {9}


def test_batches_are_the_caller_s_own():
    split = a_split(8)
    before = split.fingerprint()
    for batch in Loader(split, 4, mean=MEAN, std=STD):
        batch.x.zero_()
        batch.y.zero_()
    assert Split(split.images, split.labels).fingerprint() == before


@pytest.mark.parametrize("batch_size", [0, -3])
def test_bad_batch_size(batch_size):
    with pytest.raises(DataError, match=f"batch_size={batch_size}: a batch must have 1 image or more"):
        Loader(a_split(4), batch_size, mean=MEAN, std=STD)


def test_bad_epoch_and_seed():
    loader = Loader(a_split(4), 2, mean=MEAN, std=STD)
    with pytest.raises(DataError, match="epoch 0: epochs count from 1"):
        loader.set_epoch(0)
    with pytest.raises(DataError, match="seed=-1: the seed must be 0 or more"):
        Loader(a_split(4), 2, mean=MEAN, std=STD, seed=-1)


def test_an_empty_split_has_no_batches():
    loader = Loader(a_split(4).subset(torch.arange(0)), 2, mean=MEAN, std=STD)
    assert len(loader) == 0
    assert list(loader) == []


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80).map(torch.tensor),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    seed=st.integers(0, 2**32 - 1),
)
def test_stratified_takes_its_count_of_every_class_and_smaller_draws_lie_in_larger(labels, shares, seed):
    small, large = (stratified(labels, lambda n, share=share: int(share * n), seed=(seed, 0)) for share in shares)
    for c, n in zip(*labels.unique(return_counts=True), strict=True):
        assert int(small[labels == c].sum()) == int(shares[0] * int(n))
    assert bool((large | ~small).all())


# ------------------------------------------------------------------------------------------------ second views


@settings(deadline=None, max_examples=25)
@given(n=st.integers(6, 40), b=st.integers(3, 9), seed=seeds, epoch=epochs, world=st.integers(1, 3), start=st.integers(0, 3))
def test_a_second_view_is_drawn_apart_and_resumed_and_shared_like_the_first(n, b, seed, epoch, world, start):
    crop = CropFlip(pad=2)
    options = {"seed": seed, "shuffle": True, "augment": crop}
    alone, whole = batches(n, b, epoch, **options), batches(n, b, epoch, **options, second=Strong(crop))
    assert same(alone, whole), "the first view changed"
    parts = [batches(n, b, epoch, **options, second=Strong(crop), rank=rank, world=world) for rank in range(world)]
    for k, batch in enumerate(whole):
        assert batch.second.shape == batch.x.shape
        assert torch.equal(torch.cat([part[k].second for part in parts]), batch.second)
    loader = Loader(a_split(n), b, mean=MEAN, std=STD, **options, second=Strong(crop))
    start = min(start, len(loader))
    loader.set_epoch(epoch, start)
    rest = list(loader)
    assert same(rest, whole[start:])
    assert all(torch.equal(one.second, two.second) for one, two in zip(rest, whole[start:], strict=True))


def test_a_second_view_drawn_like_the_first_is_of_the_same_images_and_another():
    views = [batches(40, 40, epoch, augment=CropFlip(pad=3), second=CropFlip(pad=3))[0] for epoch in (1, 2)]
    plain = batches(40, 40, second=Augment())[0]
    assert torch.equal(plain.second, plain.x)
    for batch in views:
        assert not torch.equal(batch.second, batch.x)
    assert not torch.equal(views[0].second, views[1].second)


def test_fixed_views_and_a_second_view_are_refused():
    with pytest.raises(DataError, match="a second view and fixed views"):
        batches(8, 4, views=2, second=Augment())
