"""A step that reads from a cache is the step that runs the teacher, on the same views; shards are right, or made anew."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch.multiprocessing.spawn import spawn

from letkd.data import CropFlip, Loader, Split
from letkd.distiller import Distiller
from letkd.distiller.cache import SHARD, TeacherCache
from letkd.distiller.packing import pack, unpack
from letkd.errors import DataError, LetkdError, NonFiniteError, NotFittedError, RunError, Stopped
from letkd.files import hold
from letkd.methods import AT, CRD, DIST, DKD, KD, SP, SRD, TDD, FitNet, LetKD, Method, Site, letkd1, letkd2, quest
from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision
from letkd.supervision.labels import Entries, Rows, largest_labels
from tests.support.pair import SIZE, C, a_distiller, a_teacher, same_state, steps

N, MEAN, STD = 24, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def a_loader(*, views: int = 2, n: int = N, seed: int = 0, pad: int = 2, data: int = 0, **options) -> Loader:
    g = torch.Generator().manual_seed(data)
    images = torch.randint(0, 256, (n, 3, *SIZE), dtype=torch.uint8, generator=g)
    split = Split(images, torch.arange(n) % C)
    return Loader(
        split, 8, mean=MEAN, std=STD, augment=CropFlip(pad=pad), shuffle=True, drop_last=True, seed=seed, views=views, **options
    )


def fitted(method: Method | list[Method], loader: Loader, **options) -> Distiller:
    plain = Loader(loader.split, 8, mean=MEAN, std=STD)
    return a_distiller(method, "unequal", **options).fit(plain)


METHODS = {
    "kd": lambda: KD(),
    "dkd": lambda: DKD(warmup=1),
    "dist and srd": lambda: [DIST(), SRD()],
    "crd": lambda: CRD(8, 4),
    "tdd": lambda: TDD(("stage2", "stage3")),
    "quest": lambda: quest(6),
    "letkd-1": lambda: letkd1(6),
    "letkd-2": lambda: letkd2(6, 2),
    "3x3": lambda: LetKD([Site("penultimate", ConvSupervision())]),
    "crd and kd": lambda: [CRD(8, 4), KD()],
}


def test_a_cache_has_no_labels_of_a_site_with_weight_0(tmp_path):
    loader = a_loader()
    distiller = a_distiller(letkd2(6, 2), "unequal", weights={"kd/intermediate": 0.0})
    distiller.fit(Loader(loader.split, 8, mean=MEAN, std=STD), terms=["kd/penultimate"])
    distiller.cache = TeacherCache(distiller, loader, tmp_path)
    distiller.cache.prepare(0)
    assert list(distiller(next(iter(loader))).terms) == ["ce", "kd/penultimate"]
    assert list(distiller.lessons().labels) == ["penultimate"]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_losses_and_a_short_runs_weights_are_those_of_the_teacher_on_the_same_views(name, fused, tmp_path):
    """Half precision and labels below 1e-4 of the largest are all that differs: 1e-3 of the loss, exact for vectors."""
    ends, losses = [], []
    exact = name in ("kd", "dkd", "dist and srd", "crd", "tdd", "crd and kd")
    for cached in (False, True):
        loader = a_loader()
        distiller = fitted(METHODS[name](), loader, fused=fused)
        teaches = []
        if cached:
            distiller.cache = TeacherCache(distiller, loader, tmp_path)
            for view in range(2):
                distiller.cache.prepare(view)
            teach = distiller.run_teacher
            distiller.run_teacher = lambda x, teach=teach, teaches=teaches: teaches.append(1) or teach(x)
        optimizer = torch.optim.SGD(distiller.parameters(), lr=0.005)
        seen = []
        for epoch in (1, 2, 3):
            loader.set_epoch(epoch)
            seen += steps(distiller.train(), loader, optimizer)
        losses.append(seen)
        ends.append(distiller.student.state_dict())
        assert not teaches, "the teacher ran all the same"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if exact else 1e-3)
    assert len({round(loss, 3) for loss in losses[0]}) > 6, "every step is the same"
    for key in ends[0]:
        torch.testing.assert_close(ends[1][key], ends[0][key], rtol=1e-4 if exact else 1e-2, atol=1e-5 if exact else 1e-3)


@pytest.mark.parametrize("method", [AT(), FitNet(), SP()])
def test_a_method_that_reads_maps_is_told_that_no_cache_serves_it(method, tmp_path):
    loader = a_loader()
    distiller = a_distiller([method, KD()], "equal")
    cache = TeacherCache(distiller, loader, tmp_path)
    with pytest.raises(LetkdError, match=rf"stores labels, logits and pooled features, but '{method.name}' needs whole maps"):
        cache.prepare(0)
    assert not list(tmp_path.iterdir())


def test_batches_without_a_view_and_loaders_without_views_are_told(tmp_path):
    loader = a_loader()
    distiller = a_distiller(KD(), "unequal")
    distiller.cache = TeacherCache(distiller, loader, tmp_path)
    with pytest.raises(DataError, match="finds images by index and view, but the batch has none"):
        distiller(next(iter(a_loader(views=0))))
    with pytest.raises(DataError, match=r"needs a loader with fixed views; pass Loader\(views=10\)"):
        TeacherCache(distiller, a_loader(views=0), tmp_path)


def test_a_supervision_that_is_not_fitted_is_told(tmp_path):
    loader = a_loader()
    with pytest.raises(NotFittedError, match="has no rho_ yet"):
        TeacherCache(a_distiller(quest(6), "unequal"), loader, tmp_path).prepare(0)


def test_a_teacher_that_gives_nan_is_told(tmp_path):
    loader = a_loader()
    distiller = fitted(quest(6), loader)
    with torch.no_grad():
        distiller.teacher.first[0].weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinity in the teacher's"):
        TeacherCache(distiller, loader, tmp_path).prepare(0)


def shards(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def test_shards_do_not_depend_on_seed_order_or_who_makes_them_and_are_found_again(tmp_path, said):
    for folder, options in (("one", {}), ("two", {"seed": 5}), ("three", {"rank": 1, "world": 2, "views": 3})):
        loader = a_loader(**options)
        cache = TeacherCache(fitted([letkd2(6, 2), KD()], loader, seed=3), loader, tmp_path / folder)
        cache.prepare(1)
        assert "computed in" in said()
    assert shards(tmp_path / "one") == shards(tmp_path / "two") == shards(tmp_path / "three")
    assert len(shards(tmp_path / "one")) == 3
    loader = a_loader(seed=9)
    other = TeacherCache(fitted([quest(6), KD()], loader), loader, tmp_path / "one")
    other._make = None  # a method of the same needs makes nothing
    other.prepare(1)
    assert "found, 24 images" in said()


def test_labels_of_another_site_are_added_to_a_view_and_the_message_names_only_them(tmp_path, said):
    loader = a_loader()
    TeacherCache(fitted([quest(6)], loader, seed=3), loader, tmp_path).prepare(0)
    before = shards(tmp_path)
    assert "view 1 of 2: p_T at penultimate of the teacher: computed in" in said()
    TeacherCache(fitted([letkd2(6, 2)], loader, seed=3), loader, tmp_path).prepare(0)
    assert "view 1 of 2: p_T at intermediate of the teacher: computed in" in said()
    assert len(before) == 1
    assert before.items() < shards(tmp_path).items()


@pytest.mark.parametrize("change", ["teacher", "precision", "data", "augment", "tau", "fit", "view"])
def test_whatever_the_shards_depend_on_makes_others(change, tmp_path):
    view = 0

    def prepare(change: str | None) -> None:
        loader = a_loader(pad=1 if change == "augment" else 2, data=int(change == "data"))
        site = Site("penultimate", KMeansSupervision(6, 2.0 if change == "tau" else 1.0, seed=int(change == "fit")))
        teacher = a_teacher(seed=7) if change == "teacher" else None
        distiller = fitted(LetKD([site]), loader, teacher=teacher, bf16_teacher=change == "precision")
        cache = TeacherCache(distiller, loader, tmp_path)
        cache.prepare(1 if change == "view" else view)

    prepare(None)
    before = shards(tmp_path)
    prepare(change)
    after = shards(tmp_path)
    assert len(after) == 2
    assert before.items() < after.items()


def test_labels_of_images_without_a_class_depend_on_whether_the_teacher_names_their_classes(tmp_path):
    loader = a_loader()
    loader.split.labels[::2] = -1
    distiller = fitted(letkd2(6, 2), a_loader())
    for same in (True, False):
        distiller.same_classes = same
        TeacherCache(distiller, loader, tmp_path).prepare(0)
    folders = [path.name.rpartition("-")[0] for path in tmp_path.iterdir()]
    assert sorted(folders) == ["p_T-at-intermediate", "p_T-at-intermediate", "p_T-at-penultimate"]


def test_a_shard_that_another_run_has_made_in_the_meantime_is_not_made_again(tmp_path, monkeypatch):
    first, second = (TeacherCache(fitted(quest(6), loader), loader, tmp_path) for loader in (a_loader(), a_loader()))
    items, origins = second._items(), second._origins()
    first.prepare(0)
    monkeypatch.setattr(second.distiller, "run_teacher", None)
    second._make(items, origins, 0, 0)


def test_more_images_than_a_shard_holds_are_read_by_their_index(tmp_path, monkeypatch):
    import letkd.distiller.cache as module

    loader = a_loader()
    distiller = fitted([letkd2(6, 2), KD()], loader)
    whole = TeacherCache(distiller, loader, tmp_path / "whole")
    assert len(loader.split) < SHARD
    batches = list(loader)
    want = [whole.read(batch) for batch in batches]
    monkeypatch.setattr(module, "SHARD", 7)
    parts = TeacherCache(distiller, loader, tmp_path / "parts")
    for batch, (vectors, labels) in zip(batches, want, strict=True):
        again, shown = parts.read(batch)
        torch.testing.assert_close(again["logits"], vectors["logits"], rtol=1e-5, atol=1e-5)
        for site, some in labels.items():
            torch.testing.assert_close(shown[site].dense(), some.dense(), rtol=2e-3, atol=1e-6)
    assert len(list((tmp_path / "parts").rglob("0000[0-3].safetensors"))) == 3 * 4


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign", "another view's"])
def test_a_damaged_shard_is_made_anew(damage, tmp_path, said):
    loader = a_loader()
    distiller = fitted(letkd1(6), loader)
    for view in range(2):
        TeacherCache(distiller, loader, tmp_path).prepare(view)
    right = shards(tmp_path)
    first, second = sorted(tmp_path.rglob("*.safetensors"))
    content = bytearray(first.read_bytes())
    content[-3] ^= 0x10
    changed = {"cut": content[: len(content) // 2], "flip": content, "empty": b"", "foreign": b"no shard at all"}
    first.write_bytes(second.read_bytes() if damage == "another view's" else bytes(changed[damage]))
    said()
    TeacherCache(distiller, loader, tmp_path).prepare(0)
    assert said().count(f"{first}: damaged, or for other inputs; computing it again") == 1
    assert shards(tmp_path) == right


def test_a_view_half_made_goes_on_and_a_stop_is_heeded_after_each_shard(tmp_path, monkeypatch):
    import letkd.distiller.cache as module

    monkeypatch.setattr(module, "SHARD", 5)
    loader = a_loader()
    distiller = fitted(letkd2(6, 2), loader)
    TeacherCache(distiller, loader, tmp_path / "whole").prepare(0)
    calls = []

    def heed() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TeacherCache(distiller, loader, tmp_path / "half").prepare(0, heed)
    assert len(shards(tmp_path / "half")) == 4
    gone = next((tmp_path / "half").rglob("00001.safetensors"))
    gone.unlink()  # one of two sites' shards, as after a kill between their writes
    cache = TeacherCache(distiller, loader, tmp_path / "half")
    cache.prepare(0, lambda: calls.append(1))
    assert len(calls) == 2 + 4
    assert shards(tmp_path / "half") == shards(tmp_path / "whole")


@pytest.mark.slow
def test_runs_that_need_the_same_view_at_the_same_time_make_it_once(tmp_path, monkeypatch):
    import letkd.distiller.cache as module

    monkeypatch.setattr(module, "SHARD", 5)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    made, make = [], TeacherCache._make

    def slow(self, items, origins, view, s):
        if any(self._open(name, origins[name], view, s) is None for name in items):
            made.append(s)
            time.sleep(0.1)
        make(self, items, origins, view, s)

    monkeypatch.setattr(TeacherCache, "_make", slow)
    caches = []
    for _ in range(3):
        loader = a_loader()
        caches.append(TeacherCache(fitted(letkd2(6, 2), loader), loader, tmp_path / "shared"))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda cache: cache.prepare(0), caches))
    n = len(shards(tmp_path / "shared")) // 2
    assert n > 3
    assert sorted(made) == list(range(n))
    assert not list((tmp_path / "shared").rglob("*.lock"))


def test_waiting_for_another_run_is_told_heeds_a_stop_and_ends_with_the_other(tmp_path, monkeypatch, said):
    import letkd.distiller.cache as module

    monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    loader = a_loader()
    cache = TeacherCache(fitted(KD(), loader), loader, tmp_path)
    ((name, origin),) = cache._origins().items()
    lock = cache._path(name, origin, 0, 0).with_name(".00000.lock")
    lock.parent.mkdir(parents=True)
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped("stopped")

    with hold(lock):
        with pytest.raises(Stopped):
            cache.prepare(0, stop)
        assert said().count("another run is computing it; waiting") == 1
        assert not shards(tmp_path)
    cache.prepare(0)  # the other let go without having made it
    assert len(shards(tmp_path)) == 1


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    loader = a_loader()
    cache = TeacherCache(fitted(KD(), loader), loader, tmp_path / "cache")
    ((name, origin),) = cache._origins().items()
    lock = cache._path(name, origin, 0, 0).with_name(".00000.lock")
    lock.parent.mkdir(parents=True)
    (tmp_path / "precious").write_text("years of work")
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="cannot be used as a lock: it is a link"):
        cache.prepare(0)
    assert (tmp_path / "precious").read_text() == "years of work"


def test_what_is_mapped_is_not_read_into_memory(tmp_path):
    loader = a_loader()
    cache = TeacherCache(fitted(KD(), loader), loader, tmp_path)
    cache.prepare(0)
    path = next(tmp_path.rglob("*.safetensors"))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells which files are mapped")
    assert str(path) in maps.read_text()


def test_a_view_of_cifar_100_takes_less_than_150_megabytes(tmp_path):
    """letKD-2 with K = 4096 and 800 sub-classes, from a real shard of 64 images, whose labels are twice as many as a real teacher's.

    A ResNet-32 of CIFAR-100 (71.7 %) has 3 labels a pixel above 1e-4 of the largest at τ = 1.
    """
    g = torch.Generator().manual_seed(0)
    C, d, b = 100, 64, 64
    f_T, y = torch.randn(b, d, 8, 8, generator=g), torch.arange(b) % C
    penultimate, inter = KMeansSupervision(4096, 1.2), SubclassSupervision(8)
    penultimate.rho_, penultimate.nearest_ = torch.randn(4096, d, generator=g), torch.ones(())
    inter.bind("intermediate", d=d, C=C)
    inter.fit([(f_T.repeat(2, 1, 1, 1)[:100], torch.arange(100))])
    packed = [pack(part.labels(f_T, y)) for part in (penultimate, inter)]
    kept = unpack(packed[0], penultimate)
    assert isinstance(kept, Entries)
    assert 6 < len(kept.index) / (64 * b) < 9
    size = sum(len(save(tensors)) for tensors in packed)
    assert 50_000 * size / b < 150e6


def test_few_keeps_what_is_above_its_share_and_sums_to_one():
    p = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.9, 0.0999, 0.00005, 0.00005], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    want = [[0.7, 0.3, 0, 0], [0.9 / 0.9999, 0.0999 / 0.9999, 0, 0], [0.25] * 4]
    dense = largest_labels(Rows(p), 1e-4)
    assert dense.count().tolist() == [2, 2, 4]
    torch.testing.assert_close(dense.dense(), torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(largest_labels(largest_labels(Rows(p), 1e-9), 1e-4).dense(), dense.dense())


def _fill(rank: int, folder: str) -> None:
    import torch.distributed as dist

    import letkd.distiller.cache as module

    torch.set_num_threads(1)
    module.SHARD = 5
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    loader = a_loader(rank=rank, world=2)
    distiller = a_distiller([quest(6), KD()], "unequal")
    distiller.load_state_dict(torch.load(f"{folder}/state.pt", weights_only=True))
    cache = TeacherCache(distiller, loader, f"{folder}/two")
    made, make = [], cache._make
    cache._make = lambda items, origins, view, s: made.append(s) or make(items, origins, view, s)
    distiller.cache = cache
    losses = [distiller(batch).loss.item() for batch in loader]
    torch.save((made, losses), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.processes
def test_two_processes_make_a_view_between_them(tmp_path, monkeypatch):
    import letkd.distiller.cache as module

    monkeypatch.setattr(module, "SHARD", 5)
    loader = a_loader()
    distiller = fitted([quest(6), KD()], loader)
    torch.save(distiller.state_dict(), tmp_path / "state.pt")
    spawn(_fill, (str(tmp_path),), nprocs=2)
    (first, losses), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (first, second) == ([0, 2, 4], [1, 3])
    TeacherCache(distiller, loader, tmp_path / "one").prepare(0)
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    assert all(torch.tensor(losses + others).isfinite())
    shutil.rmtree(tmp_path / "two")


def test_state_and_export_know_nothing_of_a_cache(tmp_path):
    loader = a_loader()
    distiller = fitted(letkd1(6), loader)
    before = {name: value.clone() for name, value in distiller.state_dict().items()}
    distiller.cache = TeacherCache(distiller, loader, tmp_path)
    assert same_state(before, distiller.state_dict())
    distiller.export()
