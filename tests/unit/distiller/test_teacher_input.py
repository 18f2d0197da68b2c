"""What a teacher sees: the same bits where nothing differs, its own normalisation, size and class order where something does."""

import pytest
import torch

from letkd.data import Loader, Split
from letkd.distiller.cache import TeacherCache
from letkd.distiller.teacher_input import AdaptedTeacher, TeacherInput
from letkd.errors import LetkdError, UnsupportedPair
from letkd.methods import KD, SimKD, letkd1
from letkd.models import load_weights, save_weights
from letkd.taps import as_logits
from tests.support.pair import C, a_distiller, a_net, a_stream, a_teacher, images

HALF = (0.5, 0.5, 0.5)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def test_the_same_normalisation_given_twice_is_no_change_bit_for_bit():
    seen = TeacherInput(MEAN, STD, MEAN, STD)
    x = images(4)[0]
    assert seen(x) is x
    assert seen.reorder(x) is x
    assert seen.differences() == {}
    plain, given = a_distiller(KD()), a_distiller(KD(), teacher_input=seen)
    for batch in a_stream():
        assert torch.equal(plain(batch).loss, given(batch).loss)


def test_images_are_normalised_as_the_teacher_was_trained():
    pixels = torch.rand(2, 3, 6, 6, dtype=torch.float64)

    def normalised(mean, std):
        return torch.stack([(pixels[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)

    seen = TeacherInput(mean=HALF, std=HALF, from_mean=MEAN, from_std=STD)
    torch.testing.assert_close(seen(normalised(MEAN, STD)), normalised(HALF, HALF))
    assert seen(normalised(MEAN, STD).float()).dtype == torch.float32


def test_images_are_resized_and_constant_ones_stay_so():
    seen = TeacherInput(HALF, HALF, HALF, HALF, size=(24, 12))
    torch.testing.assert_close(seen(torch.full((2, 3, 16, 16), 0.3)), torch.full((2, 3, 24, 12), 0.3))
    x = torch.rand(1, 3, 24, 12)
    assert seen(x) is x


@pytest.mark.parametrize(
    ("values", "sentence"),
    [({"mean": (0.5, 0.5)}, "mean .* must be 3 numbers"), ({"from_std": (1, 0, 1)}, "from_std .* one per channel, above 0")],
)
def test_wrong_values_get_a_sentence(values, sentence):
    with pytest.raises(LetkdError, match=sentence):
        TeacherInput(**({"mean": HALF, "std": HALF, "from_mean": HALF, "from_std": HALF} | values))


def permuted(teacher, order):
    """The same network, its classes in the order that `order` undoes: logit order[c] is that of class c."""
    twin = a_teacher()
    twin.load_state_dict(teacher.state_dict())
    for mine, other in zip(twin.fc.parameters(), teacher.fc.parameters(), strict=True):
        mine.data[list(order)] = other.data
    return twin


@pytest.mark.parametrize("method", [KD, SimKD])
def test_a_teacher_of_another_class_order_teaches_the_same(method):
    teacher, order = a_teacher(), (2, 0, 1)
    plain = a_distiller(method(), teacher=teacher)
    other = a_distiller(
        method(), teacher=permuted(teacher, order), teacher_input=TeacherInput(HALF, HALF, HALF, HALF, order=order)
    )
    for batch in a_stream():
        one, two = plain(batch), other(batch)
        torch.testing.assert_close(two.loss, one.loss)
        torch.testing.assert_close(two.logits, one.logits)
    x = images(4)[0]
    torch.testing.assert_close(AdaptedTeacher(other.teacher, other.teacher_input)(x), as_logits(teacher(x), teacher))


def test_an_order_that_is_none_is_refused():
    with pytest.raises(UnsupportedPair, match="has 2 entries, but Net has 3 logits; name each index from 0 once"):
        a_distiller(KD(), teacher_input=TeacherInput(HALF, HALF, HALF, HALF, order=(1, 0)))


def test_other_classes_are_refused_by_methods_that_read_logits_alone():
    seven = a_net(5, seed=3, num_classes=7)
    with pytest.raises(UnsupportedPair, match=r"has 3 classes and the teacher Net 7; kd compares their logits"):
        a_distiller(KD(), teacher=seven)
    distiller = a_distiller(letkd1(6), teacher=seven).fit(a_stream())
    assert distiller(a_stream()[0]).logits.shape[1] == C
    foreign = TeacherInput(HALF, HALF, HALF, HALF, foreign="its classes are others")
    with pytest.raises(UnsupportedPair, match="kd reads the teacher's logits, and its classes are others"):
        a_distiller(KD(), teacher_input=foreign)
    a_distiller(letkd1(6), teacher_input=foreign)


def test_fits_and_cached_views_of_another_input_are_not_reused(tmp_path, said):
    seen = TeacherInput(HALF, HALF, MEAN, STD)
    for options, says in [({}, ""), ({"teacher_input": seen}, "differ in tap"), ({"teacher_input": seen}, "reused")]:
        a_distiller(letkd1(6), **options).fit(a_stream(), folder=tmp_path, data="these")
        assert says in said()
    pictures = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    loader = Loader(Split(pictures, torch.arange(8) % C), 4, mean=MEAN, std=STD, views=1)
    plain, other = a_distiller(KD()), a_distiller(KD(), teacher_input=seen)
    batch = next(iter(loader))
    logits = [TeacherCache(each, loader, tmp_path / "views").read(batch)[0]["logits"] for each in (plain, other)]
    assert not torch.equal(*logits)
    torch.testing.assert_close(logits[1], AdaptedTeacher(other.teacher, seen)(batch.x))


def test_weights_of_other_classes_give_all_but_the_classifier(tmp_path, said):
    five, three = a_net(4, seed=0, num_classes=5), a_net(4, seed=1)
    save_weights(five, tmp_path / "five.safetensors")
    fresh = three.fc.weight.clone()
    with pytest.raises(LetkdError, match=r"2 wrong shapes \(fc.weight"):
        load_weights(three, tmp_path / "five.safetensors")
    load_weights(three, tmp_path / "five.safetensors", num_classes=3)
    assert "fc has other classes and is trained from scratch" in said()
    assert torch.equal(three.fc.weight, fresh)
    assert torch.equal(three.last[0].conv.weight, five.last[0].conv.weight)
    with pytest.raises(LetkdError, match="wrong shape"):
        load_weights(a_net(5, seed=1), tmp_path / "five.safetensors", num_classes=3)
