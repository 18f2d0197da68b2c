"""Transferred knowledge: labels, p_T, p_S and what is kept are those of the distiller; patches are the nearest; the figure shows them."""

from dataclasses import replace

import pytest
import torch

from letkd.batch import Batch
from letkd.data import Dataset, Split
from letkd.inspect.sites import inspect_sites
from letkd.methods import LetKD, Site, letkd2, quest
from letkd.report.knowledge import OTHER, knowledge
from letkd.report.knowledge_pictures import as_json, draw_knowledge, hue
from letkd.supervision import ConvSupervision
from tests.support.pair import SIZE, C, a_distiller, a_stream


def a_data() -> Dataset:
    g = torch.Generator().manual_seed(0)
    splits = [
        Split(torch.randint(0, 256, (n, 3, *SIZE), generator=g, dtype=torch.uint8), torch.arange(n) % C) for n in (24, 3, 9)
    ]
    return Dataset("noise", *splits, classes=("ant", "bee", "cat"), mean=(0.5,) * 3, std=(0.25,) * 3, flip=False)


def test_patches_are_cut_from_the_images_whose_features_are_compared(distiller):
    data = a_data()
    labels = torch.where(torch.arange(24) % 4 == 1, -1, data.train.labels)
    some = replace(data, train=Split(data.train.images, labels))
    only = replace(data, train=data.train.subset(labels >= 0))
    given, wanted = ([as_json(site, "x") for site in knowledge(distiller, one, images=3)] for one in (some, only))
    assert given == wanted


@pytest.fixture
def distiller():
    return a_distiller(letkd2(6, 2)).fit(a_stream())


def test_every_location_tells_what_the_distiller_computes(distiller):
    data = a_data()
    before = torch.get_rng_state()
    sites = {one.site: one for one in knowledge(distiller, data, images=3)}
    assert torch.equal(torch.get_rng_state(), before)
    assert set(sites) == {"intermediate", "penultimate"}
    one = sites["intermediate"]
    assert (one.kind, one.labels, one.per_class, one.size) == ("subclass", 6, 2, (4, 4))
    assert [one.classes[picture.true] for picture in one.pictures] == ["ant", "bee", "cat"]
    assert one.name(5) == "cat.2"
    x = (data.test.images[:3].float() / 255 - 0.5) / 0.25
    distiller.eval()
    seen = inspect_sites(distiller, Batch(x, torch.arange(3)))["intermediate"]
    with torch.no_grad():
        a, p_T = seen.a(), seen.p_T()
        p_S, p = a.softmax(dim=1), seen.p(a)
        x_hat = seen.layer(seen.x)
    for b, picture in enumerate(one.pictures):
        for n, at in enumerate(picture.locations):
            i, j = divmod(n, 4)
            assert at.label // 2 == b, "its own class's sub-class"
            torch.testing.assert_close(p_T[b, :, i, j], distiller.fittings()["intermediate"].part.s_T_[at.label])
            for entries, whole in ((at.p_T, p_T), (at.p_S, p_S)):
                assert entries == sorted(entries, key=lambda entry: -entry[1])
                for k, value in entries:
                    assert value == pytest.approx(float(whole[b, k, i, j]), abs=1e-5)
            kept = p[b, :, i, j]
            assert {k for k, _ in at.kept} == set(kept.nonzero().flatten().tolist())
            assert not at.kept or sum(v for _, v in at.kept) == pytest.approx(1, abs=1e-5)
            added = (x_hat - seen.x)[b, :, i, j].norm() / seen.x[b, :, i, j].norm().clamp_min(1e-12)
            assert at.added == pytest.approx(float(added), rel=1e-3)


def test_patches_are_the_pixels_nearest_to_a_template(distiller):
    data = a_data()
    one = next(one for one in knowledge(distiller, data) if one.site == "penultimate")
    supervision = distiller.fittings()["penultimate"].part
    x = (data.train.images.float() / 255 - 0.5) / 0.25
    f_T = inspect_sites(distiller, Batch(x, data.train.labels))["penultimate"].f_T
    distance = torch.cdist(f_T.permute(0, 2, 3, 1).reshape(-1, f_T.shape[1]).double(), supervision.rho_.double())
    label = distance.argmin(dim=1)
    counts = torch.bincount(label, minlength=6)
    for template in one.templates:
        assert template.share == pytest.approx(int(counts[template.label]) / len(label))
        own = distance[:, template.label].clone()
        own[label != template.label] = torch.inf
        b, rest = divmod(int(own.argmin()), 16)
        i, j = divmod(rest, 4)
        padded = torch.nn.functional.pad(data.train.images[b], (4, 4, 4, 4))
        assert torch.equal(template.patches[0], padded[:, 4 * i : 4 * i + 12, 4 * j : 4 * j + 12])
        assert len({patch.numpy().tobytes() for patch in template.patches}) == len(template.patches)


def test_the_figure_marks_each_location_and_shows_the_row(distiller):
    one = next(one for one in knowledge(distiller, a_data(), images=2) if one.site == "intermediate")
    figure = draw_knowledge(one)
    left, right = figure.axes[:2]
    (dots,) = left.collections
    assert len(dots.get_offsets()) == 16
    assert dots.get_offsets()[5].tolist() == [5.5, 5.5], "the middle of the second pixel of the second row, four wide"
    assert [tuple(colour[:3]) for colour in dots.get_facecolors()] == [
        pytest.approx(hue(at.colour)) for at in one.pictures[0].locations
    ]
    first = one.pictures[0].locations[0]
    shown = {(round(bar.get_x() + bar.get_width() / 2), round(bar.get_height(), 5)) for bar in right.patches}
    labels = [at.label for at in one.pictures[0].locations]
    often = max(set(labels), key=labels.count)
    at = next(at for at in one.pictures[0].locations if at.label == often)
    assert {(k, round(v, 5)) for k, v in at.p_T} <= shown
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["ant", "bee", "cat"]
    assert hue(OTHER)[0] == hue(OTHER)[1]
    assert first.colour in (0, 1)


def test_other_supervisions_and_students_without_a_layer():
    (one,) = knowledge(a_distiller(quest(6)).fit(a_stream()), a_data())
    assert one.kind == "kmeans"
    assert one.pictures[0].locations[0].kept is None
    (one,) = knowledge(a_distiller(LetKD([Site("penultimate", ConvSupervision())])), a_data())
    assert (one.kind, one.labels, one.name(3)) == ("conv3x3", 10, "3")
    text = as_json(one, "letKD-1")
    assert text["pictures"][0]["png"].startswith("data:image/png;base64,")
    assert all(len(at["T"]) <= 12 for at in text["pictures"][0]["locations"])
    assert knowledge(a_distiller(letkd2(6, 2), weights={"kd/penultimate": 0.0, "kd/intermediate": 0.0}), a_data()) == []
