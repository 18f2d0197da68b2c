"""Images without labels in a step and in the fits: each term counts the images that it should, and no others."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import DataError, FitError, LetkdError, UnsupportedPair
from letkd.methods import CRD, DKD, KD, MLKD, SRD, TDD, LetKD, ReviewKD, Site, letkd1, letkd2, quest
from letkd.runs.evaluation import evaluate
from letkd.supervision import KMeansSupervision, SubclassSupervision
from letkd.training.heldout import held_out_terms
from tests.support.pair import C, a_distiller, a_net, a_stream, a_student, a_teacher, same_state

SOME = torch.tensor([True, False, True, True, False, False, True, False])


def partly(batch: Batch) -> Batch:
    """The batch without half of its labels."""
    return Batch(batch.x, torch.where(SOME, batch.y, -1), batch.index, second=batch.second)


def of(batch: Batch, rows: torch.Tensor) -> Batch:
    return Batch(batch.x[rows], batch.y[rows], None if batch.index is None else batch.index[rows])


def at_rest(methods, **options) -> Distiller:
    """In eval mode, so that an image's features do not depend on the others of its batch."""
    return a_distiller(methods, **options).fit(a_stream()).eval()


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("item", [(a_stream()[0].x,), (a_stream()[0].x, None), Batch(a_stream()[0].x)])
def test_images_alone_have_minus_one_for_labels(item):
    batch = Batch.of(item)
    assert batch.y.tolist() == [-1] * 8
    assert batch.y.dtype == torch.int64
    assert not batch.all_labelled
    assert len(batch.labelled()) == 0


def test_a_batch_knows_which_images_have_a_label():
    batch = a_stream()[0]
    assert batch.labelled() is None
    assert partly(batch).labelled().tolist() == SOME.nonzero().flatten().tolist()
    assert partly(batch).to("cpu").labelled().tolist() == SOME.nonzero().flatten().tolist()


def test_a_loss_over_labels_is_its_mean_over_labelled_images_even_if_they_are_mixed():
    batch, logits = partly(a_stream()[0]), torch.randn(8, C, dtype=torch.float64)
    by_loops = sum(F.cross_entropy(logits[i], batch.y[i]) for i in range(8) if batch.y[i] >= 0) / 4
    torch.testing.assert_close(batch.over_labels(F.cross_entropy, logits), by_loops)
    mixed = Batch(batch.x, batch.y, y2=batch.y.roll(1), lam=0.7)
    other = sum(F.cross_entropy(logits[i], mixed.y2[i]) for i in range(8) if mixed.y2[i] >= 0) / 4
    torch.testing.assert_close(mixed.over_labels(F.cross_entropy, logits), 0.7 * by_loops + 0.3 * other)


def test_without_any_label_the_loss_is_zero_and_still_reaches_what_it_would_reach():
    logits = torch.randn(8, C, requires_grad=True)
    loss = Batch(a_stream()[0].x).over_labels(F.cross_entropy, logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_parts_of_a_batch_in_several_processes_give_the_mean_over_the_labelled_images_of_all():
    batch, logits = partly(a_stream()[0]), torch.randn(8, C, dtype=torch.float64)
    whole = batch.over_labels(F.cross_entropy, logits)
    rows = torch.arange(8).split([3, 5])  # two labelled images in each; then another split with three and one
    for parts in (rows, (torch.arange(4), torch.arange(4, 8))):
        losses = [
            Batch(batch.x[at], batch.y[at], labelled_per_process=2.0).over_labels(F.cross_entropy, logits[at]) for at in parts
        ]
        torch.testing.assert_close(sum(losses) / 2, whole)


def test_accuracy_is_for_labelled_images_alone():
    with pytest.raises(DataError, match=r"a label is -1.*accuracy is not defined for images without a label"):
        evaluate(a_student(), [partly(a_stream()[0])])


# ------------------------------------------------------------------------------------------------ a step


def test_cross_entropy_counts_labelled_images_and_kd_counts_all():
    distiller, batch = at_rest(KD()), a_stream()[0]
    terms = distiller(partly(batch)).terms
    torch.testing.assert_close(terms["ce"], distiller(of(batch, SOME)).terms["ce"])
    torch.testing.assert_close(terms["kd"], distiller(batch).terms["kd"])
    assert distiller(Batch(batch.x)).terms["ce"].item() == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", [lambda: quest(6), lambda: letkd1(6)])
def test_k_means_labels_count_all_images(method, fused):
    distiller, batch = at_rest(method(), fused=fused), a_stream()[0]
    assert torch.equal(distiller(Batch(batch.x)).terms["kd/penultimate"], distiller(batch).terms["kd/penultimate"])


def subclasses(unlabelled: str) -> LetKD:
    return LetKD([Site("intermediate", SubclassSupervision(2, unlabelled=unlabelled))])


@pytest.mark.parametrize("fused", [True, False])
def test_sub_classes_of_an_unlabelled_image_are_those_of_the_class_that_the_teacher_predicts(fused):
    distiller, batch = at_rest(subclasses("teacher"), fused=fused), a_stream()[0]
    predicted = distiller.teacher(batch.x).argmax(dim=1)
    filled = Batch(batch.x, torch.where(SOME, batch.y, predicted))
    assert not torch.equal(filled.y, batch.y)  # or the test would show nothing
    terms = distiller(partly(batch)).terms
    torch.testing.assert_close(terms["kd/intermediate"], distiller(filled).terms["kd/intermediate"])


@pytest.mark.parametrize("fused", [True, False])
def test_sub_classes_leave_an_unlabelled_image_out_if_asked(fused):
    distiller, batch = at_rest(subclasses("skip"), fused=fused), a_stream()[0]
    expected = distiller(of(batch, SOME)).terms["kd/intermediate"]
    torch.testing.assert_close(distiller(partly(batch)).terms["kd/intermediate"], expected)
    assert distiller(Batch(batch.x)).terms["kd/intermediate"].item() == 0


def test_sub_classes_leave_an_unlabelled_image_out_if_the_teacher_knows_other_classes():
    torch.manual_seed(0)
    teacher = a_net(5, seed=100, num_classes=7)
    distiller, batch = at_rest(subclasses("teacher"), teacher=teacher), a_stream()[0]
    assert not distiller.same_classes
    expected = distiller(of(batch, SOME)).terms["kd/intermediate"]
    torch.testing.assert_close(distiller(partly(batch)).terms["kd/intermediate"], expected)


@pytest.mark.parametrize(("method", "term"), [(lambda: DKD(warmup=1), "dkd"), (TDD, "tdd"), (MLKD, "mlkd/ce")])
def test_terms_that_read_the_label_count_labelled_images(method, term):
    distiller, batch = at_rest(method()), a_stream()[0]
    some = Batch(batch.x[SOME], batch.y[SOME], second=batch.second[SOME])
    torch.testing.assert_close(distiller(partly(batch)).terms[term], distiller(some).terms[term])


# ------------------------------------------------------------------------------------------------ the fits


def test_k_means_is_fitted_to_all_images_and_sub_classes_to_labelled_ones():
    whole, stream = a_distiller(letkd2(6, 2)).fit(a_stream()), [partly(batch) for batch in a_stream()]
    some = a_distiller(letkd2(6, 2)).fit(stream)
    labelled = a_distiller(letkd2(6, 2)).fit([of(batch, SOME) for batch in a_stream()])
    fits = [{site: fitting.part.state_dict() for site, fitting in d.fittings().items()} for d in (whole, some, labelled)]
    assert same_state(fits[1]["penultimate"], fits[0]["penultimate"])
    assert same_state(fits[1]["intermediate"], fits[2]["intermediate"])
    assert not same_state(fits[1]["penultimate"], fits[2]["penultimate"])
    assert not same_state(fits[1]["intermediate"], fits[0]["intermediate"])


def test_sub_classes_without_any_label_are_a_sentence():
    with pytest.raises(FitError, match=r"sub-classes at 'intermediate' need labelled images, but there are none; use"):
        a_distiller(letkd2(6, 2)).fit([Batch(batch.x) for batch in a_stream()])


@pytest.mark.slow
def test_for_crd_an_unlabelled_image_is_a_class_of_its_own():
    distiller = a_distiller(CRD(K=8, feat_dim=6)).fit([partly(batch) for batch in a_stream()])
    bank = distiller.fittings()["crd"].part
    labels = torch.cat([partly(batch).y for batch in a_stream()])
    assert torch.equal(bank.y_[labels >= 0], labels[labels >= 0])
    assert len(bank.y_[labels < 0].unique()) == 12
    negatives = bank.negatives(torch.tensor([1]))  # without a label
    assert 1 not in negatives
    step = distiller(partly(a_stream()[0]))
    step.loss.backward()
    assert torch.isfinite(step.loss)


def test_a_wrong_option_is_a_sentence():
    with pytest.raises(FitError, match="unlabelled='guess': choose 'teacher' or 'skip'"):
        SubclassSupervision(2, unlabelled="guess")


# ------------------------------------------------------------------------------------------------ tasks


def dense(d: int) -> torch.nn.Module:
    """A network that gives maps, not logits."""
    net = a_net(d, seed=0)
    return torch.nn.Sequential(net.first, net.last, torch.nn.Conv2d(2 * d, 4, 1))


def per_pixel(output, batch):
    return {"pixels": F.mse_loss(output, batch.target), "size": output.square().mean()}


MAPS = {"student_taps": {"penultimate": "1"}, "teacher_taps": {"penultimate": "1"}, "example": torch.zeros(1, 3, 16, 16)}


def test_a_task_takes_the_place_of_the_cross_entropy_and_its_output_may_have_any_shape():
    x, target = a_stream()[0].x, torch.randn(8, 4, 4, 4)
    distiller = Distiller(dense(4), dense(5), letkd1(6), task=per_pixel, weights={"size": 0.5}, **MAPS).fit([(x, target)])
    step = distiller((x, target))
    assert list(step.terms) == ["pixels", "size", "kd/penultimate"]
    expected = step.terms["pixels"] + 0.5 * step.terms["size"] + step.terms["kd/penultimate"]
    torch.testing.assert_close(step.loss, expected)
    assert step.logits.shape == (8, 4, 4, 4)
    step.loss.backward()
    assert all(p.grad is not None for p in distiller.student.parameters())
    assert distiller.export()(x).shape == (8, 4, 4, 4)


def test_a_task_gets_labels_as_its_target_and_methods_still_read_them():
    distiller = a_distiller(letkd2(6, 2), task=lambda output, batch: {"own": F.cross_entropy(output, batch.target)})
    distiller.fit([(batch.x, batch.y, batch.index) for batch in a_stream()])
    plain = a_distiller(letkd2(6, 2)).fit(a_stream())
    one, two = distiller.eval()((a_stream()[0].x, a_stream()[0].y)), plain.eval()(a_stream()[0])
    torch.testing.assert_close(list(one.terms.values()), list(two.terms.values()))


def test_sub_classes_of_a_task_need_classes():
    x, y = a_stream()[0].x, a_stream()[0].y
    options = {"task": per_pixel, **MAPS}
    with pytest.raises(UnsupportedPair, match="'penultimate' need classes, but the student returns no logits; pass C="):
        Distiller(dense(4), dense(5), LetKD([Site("penultimate", SubclassSupervision(2))]), **options)
    known = LetKD([Site("penultimate", SubclassSupervision(2, C=3))])
    distiller = Distiller(dense(4), dense(5), known, **options).fit([(x, y)])
    assert distiller.fittings()["penultimate"].part.s_T_.shape == (6, 6)


def test_a_task_whose_terms_all_have_weight_0_is_refused():
    distiller = Distiller(dense(4), task=per_pixel, weights={"pixels": 0.0, "size": 0.0})
    with pytest.raises(LetkdError, match=r"all terms \(pixels, size\) have weight 0"):
        distiller((a_stream()[0].x, torch.randn(8, 4, 4, 4)))


def test_integers_of_a_task_need_not_be_classes():
    x, ages = a_stream()[0].x, torch.tensor([3, 57, 20, -5, 80, 7, 31, 2])
    task = lambda output, batch: {"own": (output.mean(dim=(1, 2, 3)) - batch.target).square().mean()}  # noqa: E731
    distiller = Distiller(dense(4), dense(5), letkd1(6), task=task, **MAPS).fit([(x, ages)])
    assert distiller((x, ages)).loss.isfinite()
    needy = a_distiller(DKD(), task=lambda output, batch: {"own": output.mean()})
    with pytest.raises(DataError, match="a label is 80, but with"):
        needy((x, ages.clamp_min(0)))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            lambda output, batch: output.mean(),
            r"the task must return its loss terms by name, \{name: scalar\}, but it returned a Tensor",
        ),
        (
            lambda output, batch: {"pixels": output},
            r"the task must return a scalar tensor, but it returned shape \[8, 4, 4, 4\]",
        ),
        (lambda output, batch: {"other": output.mean()}, r"there is a weight for 'pixels', but the task returns 'other'"),
        (
            lambda output, batch: {"pixels": output.mean(), "kd/penultimate": output.mean()},
            r"both have the term 'kd/penultimate'",
        ),
    ],
)
def test_what_a_task_may_not_return(task, sentence):
    x = a_stream()[0].x
    distiller = Distiller(dense(4), dense(5), letkd1(6), task=task, weights={"pixels": 1.0}, **MAPS).fit([(x, None)])
    with pytest.raises(LetkdError, match=sentence):
        distiller((x, None))


def test_a_task_and_a_criterion_are_one_too_many():
    with pytest.raises(LetkdError, match=r"a criterion and a task were given.*give only one"):
        Distiller(a_student(), criterion=F.cross_entropy, task=per_pixel)


def test_logits_cannot_be_compared_if_there_are_none():
    with pytest.raises(UnsupportedPair, match=r"kd compares logits \[b C\], and the student .* returns none"):
        Distiller(dense(4), a_teacher(), KD(), task=per_pixel, example=torch.zeros(1, 3, 16, 16))


def test_k_from_the_data_needs_no_classes():
    method = LetKD([Site("penultimate", KMeansSupervision("auto"))])
    Distiller(dense(4), dense(5), method, task=per_pixel, images=24, **MAPS)
    assert method.sites["penultimate"].supervision.K == 4  # 24 images of 4x4 pixels, 64 or more per centre


# ------------------------------------------------------------------------------------------------ held-out images


def test_a_term_that_warms_up_has_its_full_weight_on_held_out_images():
    batches = [replace(batch, epoch=1) for batch in a_stream()]
    warm, full = (held_out_terms(at_rest(ReviewKD(warmup=warmup)), batches) for warmup in (20, 0))
    assert warm == full
    assert warm["reviewkd"] > 0


def test_methods_that_compare_two_views_have_no_term_on_held_out_images():
    batches = [Batch(batch.x, batch.y) for batch in a_stream()]
    assert held_out_terms(at_rest(MLKD()), batches) == {}
    assert set(held_out_terms(at_rest([MLKD(), SRD()]), batches)) == {"srd"}


def test_a_last_batch_of_one_image_is_left_out_by_methods_that_normalise_over_the_batch():
    batch = a_stream()[0]
    one = Batch(batch.x[:1], batch.y[:1])
    assert held_out_terms(at_rest(SRD()), [batch, one]) == held_out_terms(at_rest(SRD()), [batch])
    assert held_out_terms(at_rest(KD()), [batch, one]) != held_out_terms(at_rest(KD()), [batch])
