"""What bad input gets: one sentence that says what was asked, what is true and what to do; and nothing is lost."""

import pytest
import torch
from torch import nn

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.errors import (
    DataError,
    FitError,
    LetkdError,
    NonFiniteError,
    NotFittedError,
    RecipeError,
    TapError,
    UnsupportedPair,
)
from letkd.methods import KD, QUEST, LetKD, Site, letkd1, letkd2, quest
from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision
from letkd.taps import Tap
from tests.support.pair import SIZE, TAPS, C, a_distiller, a_net, a_stream, a_student, a_teacher, features, images, same_state


def build(method, *, student=None, teacher=None, **options) -> Distiller:
    options = {"student_taps": TAPS, "teacher_taps": TAPS, "example": torch.zeros(1, 3, *SIZE), **options}
    return Distiller(student or a_student(), teacher or a_teacher(), method, **options)


# ------------------------------------------------------------------------------------------------ the pair

WRONG_PAIRS = {
    "unknown path": (
        {"student_taps": {**TAPS, "penultimate": "last.9"}},
        TapError,
        r"Net has no module 'last\.9'; nearest: last\.\d",
    ),
    "unknown path of the teacher": (
        {"teacher_taps": {**TAPS, "penultimate": "layer4"}},
        TapError,
        r"Net has no module 'layer4'; nearest: last",
    ),
    "not a map, student": (
        {"student_taps": {**TAPS, "penultimate": "fc"}},
        TapError,
        r"tap 'penultimate' of the student: 'fc' gives \[b 3\], and a map \[b d h w\] is needed; name a module before the pooling",
    ),
    "not a map, teacher": (
        {"teacher_taps": {**TAPS, "penultimate": Tap("fc", io="input")}},
        TapError,
        r"tap 'penultimate' of the teacher: 'fc' gives \[b 10\], and a map \[b d h w\] is needed",
    ),
    "no such role, student": (
        {"student_taps": None},
        TapError,
        r"the student Net has no tap for the role 'intermediate' \(it has: none\); name one with "
        r"student_taps=\{'intermediate': 'module.path'\} or --student-tap intermediate=module.path",
    ),
    "no such role, teacher": (
        {"teacher_taps": {"penultimate": "last"}},
        TapError,
        r"the teacher Net has no tap for the role 'intermediate' \(it has: penultimate\)",
    ),
    "graft at an input": (
        {"student_taps": {**TAPS, "penultimate": Tap("last.1", io="input")}},
        TapError,
        r"tap 'penultimate' of the student is an input; a layer can only follow a module's output",
    ),
    "other classes": (
        {"teacher": lambda: a_net(5, seed=1, num_classes=7), "methods": lambda: [letkd2(6, 2), KD()]},
        UnsupportedPair,
        r"the student Net has 3 classes and the teacher Net 7; kd compares their logits: build both for the same classes",
    ),
    "student's maps larger": (
        {"teacher": lambda: a_net(5, seed=1, stride=4), "methods": lambda: pooled()},
        UnsupportedPair,
        r"the teacher's map at 'intermediate' is 2x2 and the student's 4x4: average pooling needs a whole ratio",
    ),
    "no whole ratio": (
        {"student": lambda: a_net(5, seed=1, stride=3), "methods": lambda: pooled()},
        UnsupportedPair,
        r"the teacher's map at 'intermediate' is 4x4 and the student's 3x3: average pooling needs a whole ratio of teacher to "
        r"student size; use match='resize', or choose taps whose sizes divide",
    ),
    "no logits": (
        {"student": lambda: nn.Sequential(nn.Conv2d(3, 4, 1))},
        TapError,
        r"Sequential has no module '\w+",
    ),
    "unknown weights": (
        {"weights": {"kd/penultimat": 2.0, "cd": 0.0, "ce": 1.0}},
        LetkdError,
        r"there is a weight for 'kd/penultimat' \(nearest: kd/penultimate.*\), 'cd' \(nearest: .*\), "
        r"but the terms are ce, kd/intermediate, kd/penultimate",
    ),
    "no weight": (
        {"weights": {"kd/penultimate": 0.0, "kd/intermediate": 0.0, "ce": 0.0}},
        LetkdError,
        r"all terms \(ce, kd/intermediate, kd/penultimate\) have weight 0, so there is nothing to learn",
    ),
    "no example": (
        {"example": None},
        TapError,
        r"Net and Net do not say their input size \(`input_size`\): pass example=one input \[1 3 H W\]",
    ),
}


def pooled() -> LetKD:
    """A site that takes the paper's whole ratios alone."""
    return LetKD([Site("intermediate", SubclassSupervision(2), match="pool")])


@pytest.mark.parametrize("case", WRONG_PAIRS)
def test_a_pair_that_does_not_fit_says_why_and_the_student_is_untouched(case):
    options, error, sentence = WRONG_PAIRS[case]
    options = dict(options)
    student, teacher = options.pop("student", a_student)(), options.pop("teacher", a_teacher)()
    student.train()
    state, x = {key: value.clone() for key, value in student.state_dict().items()}, images(2)[0]
    modes = [module.training for module in student.modules()]
    with pytest.raises(error, match=sentence):
        build(options.pop("methods", lambda: letkd2(6, 2))(), student=student, teacher=teacher, **options)
    assert same_state(student.state_dict(), state)
    assert not any(module._forward_hooks for module in student.modules())
    assert [module.training for module in student.modules()] == modes
    if hasattr(student, "fc"):
        assert torch.equal(student.eval()(x), a_copy_of(student)(x))


def a_copy_of(student: nn.Module) -> nn.Module:
    bare = a_net(student.fc.in_features // 2, seed=5, stride=student.last[0].conv.stride[0])
    bare.load_state_dict(student.state_dict())
    return bare.eval()


def test_after_a_failed_build_the_same_student_builds():
    student = a_student()
    with pytest.raises(TapError):
        build(letkd2(6, 2), student=student, student_taps={**TAPS, "penultimate": Tap("last.1", io="input")})
    step = build(letkd2(6, 2), student=student).fit(a_stream())(a_stream()[0])
    assert torch.isfinite(step.loss)


def test_a_student_that_has_the_layer_already_is_refused_and_kept():
    distiller = build(letkd1(6))
    keys = list(distiller.student.state_dict())
    with pytest.raises(TapError, match=r"module 'last' of Net already has a child 'kd_penultimate'"):
        build(letkd2(6, 2), student=distiller.student)
    assert list(distiller.student.state_dict()) == keys


def test_methods_need_a_teacher_and_not_the_student_itself():
    with pytest.raises(LetkdError, match=r"^kd, letkd needs a teacher, but none was given$"):
        Distiller(a_student(), None, [KD(), letkd1(6)])
    student = a_student()
    with pytest.raises(LetkdError, match=r"student and teacher are the same object, so the teacher would be trained; copy one"):
        build(KD(), student=student, teacher=student)
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_a_model_without_logits():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(TapError, match=r"Sequential must return logits \[b C\], but it returned a tensor \[1, 4, 16, 16\]"):
        build(KD(), student=model, student_taps=None)


@pytest.mark.parametrize("roles", [[], ["penultimate", "penultimate"]])
def test_sites_stand_each_once(roles):
    with pytest.raises(UnsupportedPair, match=r"LetKD needs sites, each with its own role and supervision; it got \["):
        LetKD([Site(role, KMeansSupervision(4)) for role in roles])


def test_sites_do_not_share_a_supervision():
    shared = KMeansSupervision(4)
    with pytest.raises(UnsupportedPair, match=r"its own role and supervision; it got \['stage3', 'penultimate'\]"):
        LetKD([Site(role, shared) for role in ("stage3", "penultimate")])


def test_roles_with_the_same_module_name_are_refused():
    with pytest.raises(UnsupportedPair, match=r"its own role and supervision; it got \['a\.b', 'a_b'\]"):
        LetKD([Site(role, KMeansSupervision(4)) for role in ("a.b", "a_b")])


@pytest.mark.parametrize("K", [0, -3])
def test_k_is_a_count(K):
    with pytest.raises(FitError, match=rf'K-means with K={K!r}: K must be 1 or more, or "auto"'):
        KMeansSupervision(K)


def test_two_methods_that_would_take_each_others_place_are_refused():
    with pytest.raises(LetkdError, match=r"two methods have the term 'kd', but only one of them would count; remove one"):
        build([KD(1.0), KD(4.0)])
    student = a_student()
    with pytest.raises(LetkdError, match=r"two methods have a site at 'penultimate'; give one of them another role"):
        build([quest(6), letkd1(5)], student=student)
    assert list(student.state_dict()) == list(a_student().state_dict())
    both = {**TAPS, "again": "last"}
    step = build([quest(6), LetKD([Site("again", KMeansSupervision(5))])], student_taps=both, teacher_taps=both).fit(
        a_stream()
    )(a_stream()[0])
    assert set(step.terms) == {"ce", "kd/penultimate", "kd/again"}


def test_conv_supervision_alone_does_not_know_its_K():
    with pytest.raises(UnsupportedPair, match=r"ConvSupervision\(tau=1\) takes K from the teacher's 3x3 convolution"):
        ConvSupervision().num_labels()


# ------------------------------------------------------------------------------------------------ the offline part


def test_k_larger_than_the_pixels_seen():
    distiller = build(quest(500))
    with pytest.raises(
        FitError,
        match=r"K-means at 'penultimate' needs at least K=500 pixels but got 384; choose a smaller K, such as 8, or more images",
    ):
        distiller.fit(a_stream())
    with pytest.raises(FitError, match=r"pixels but got 0"):
        distiller.fit([])


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            [0] * 6 + [1] * 5 + [2],
            r"every class needs at least K_inter=16 pixels at 'here', but class 2 has 15; add images",
        ),
        ([0] * 7 + [2] * 5, r"but class 1 has 0; add images of them or lower K_inter"),
        ([0] * 12, r"but class 1 has 0, class 2 has 0; add"),
    ],
)
def test_a_class_with_too_few_pixels(labels, sentence):
    supervision = SubclassSupervision(16, C=C)
    supervision.bind("here", d=4, C=C)
    with pytest.raises(FitError, match=sentence):
        supervision.fit([(features()[0], torch.tensor(labels))])
    assert not supervision.is_fitted


def test_many_short_classes_are_counted_not_listed():
    supervision = SubclassSupervision(2, C=100)
    with pytest.raises(FitError, match=r"class 3 has 0, .*class 7 has 0 and 92 more classes have too few"):
        supervision.fit([features()[:2]])


def test_one_pixel_a_class_leaves_nothing_to_whiten():
    supervision = SubclassSupervision(1, C=C)
    with pytest.raises(FitError, match=r"constant or the same for every class"):
        supervision.fit([(torch.randn(3, 4, 1, 1), torch.arange(3))])


def test_one_class_alone_cannot_be_told_apart():
    with pytest.raises(FitError, match=r"LDA at 'its site' needs at least two classes, but there is only one"):
        SubclassSupervision(2, C=1).fit([(features()[0], torch.zeros(12, dtype=torch.int64))])


def test_sub_classes_must_know_the_classes():
    with pytest.raises(FitError, match=r"SubclassSupervision\(K=8, r=60\) needs the number of classes; pass C="):
        SubclassSupervision().num_labels()


def test_labels_out_of_range_in_the_stream():
    f_T, y, _ = features()
    with pytest.raises(FitError, match=r"labels at 'its site' range from 0 to 2, but with 2 classes they must be 0 to 1"):
        SubclassSupervision(2, C=2).fit([(f_T, y)])
    distiller = build(quest(6))
    with pytest.raises(DataError, match=r"a label is -2, but with C classes labels range from 0 to C - 1"):
        distiller.fit([(batch.x, batch.y - 2) for batch in a_stream()])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_stream_that_is_not_finite_names_the_tap_and_fits_nothing(bad):
    distiller = build(letkd2(6, 2))
    stream = a_stream()
    stream[2].x[0, 0, 0, 0] = bad
    with pytest.raises(
        NonFiniteError, match=r"the teacher's map at 'intermediate' contains NaN or infinity; nothing was fitted"
    ):
        distiller.fit(stream)
    assert not any(fitting.part.is_fitted for fitting in distiller.fittings().values())


def test_what_is_not_fitted_is_named_with_k_and_site():
    with pytest.raises(
        NotFittedError, match=r"KMeansSupervision\(K=6, tau=1\) at 'penultimate' has no rho_ yet. Run `letkd fit`, or"
    ):
        build(letkd1(6))(a_stream()[0])


def test_fit_into_a_folder_must_know_the_data(tmp_path):
    with pytest.raises(
        LetkdError, match=r"fit\(folder=…\) needs a name for the data, which is stored in the files; pass data="
    ):
        build(quest(6)).fit(a_stream(), folder=tmp_path)


# ------------------------------------------------------------------------------------------------ a step


@pytest.fixture
def distiller() -> Distiller:
    return a_distiller(letkd1(6)).fit(a_stream())


@pytest.mark.parametrize(
    ("label", "sentence"), [(3, "a label is 3, but with 3 classes labels range from 0 to 2"), (-2, "a label is -2")]
)
def test_labels_out_of_range_in_a_step(distiller, label, sentence):
    batch = a_stream()[0]
    batch.y[4] = label
    with pytest.raises(DataError, match=sentence):
        distiller(batch)


@pytest.mark.parametrize("item", [torch.zeros(2, 3, 4, 4), (), {"x": 1}, (torch.zeros(1), [0]), 7])
def test_what_a_loader_may_yield(distiller, item):
    sentence = r"a loader must yield tensors as \(x, y\), \(x, y, index\) or letkd.Batch; it yielded a \w+"
    with pytest.raises(DataError, match=sentence):
        distiller(item)
    with pytest.raises(DataError, match=sentence):
        distiller.fit([item])


def poison_input(distiller, batch):
    batch.x[0, 0, 0, 0] = torch.nan
    batch.epoch = 4


def poison_student(distiller, batch):
    nn.init.constant_(distiller.student.last[1].bn.bias, torch.nan)


def poison_omega(distiller, batch):
    nn.init.constant_(distiller.student.last.kd_penultimate.omega.scale, torch.inf)


def poison_head(distiller, batch):
    nn.init.constant_(distiller.student.fc.bias, torch.inf)


def poison_labels(distiller, batch):
    distiller.fittings()["penultimate"].part.rho_[0, 0] = torch.nan


def poison_weight(distiller, batch):
    distiller.weights["ce"] = torch.inf


@pytest.mark.parametrize(
    ("poison", "where"),
    [
        (poison_input, r"the input batch of epoch 4"),
        (poison_student, r"the student's tap 'penultimate\.x'"),
        (poison_omega, r"the student's tap 'penultimate\.log_Z'"),
        (poison_head, r"the student's tap 'logits'"),
        (poison_labels, r"the loss term 'kd/penultimate'"),
        (poison_weight, r"the weighted loss"),
    ],
)
def test_nan_in_a_step_names_where_it_began(distiller, poison, where):
    batch = a_stream()[0]
    poison(distiller, batch)
    with pytest.raises(
        NonFiniteError, match=rf"NaN or infinity in {where} \(terms: ce=.*, kd/penultimate=.*\); stopped before it"
    ):
        distiller(batch)


def test_without_checks_nan_goes_through(distiller):
    distiller.checks = False
    batch = a_stream()[0]
    poison_student(distiller, batch)
    assert distiller(batch).loss.isnan()


def test_a_batch_whose_maps_do_not_divide_is_refused_when_it_comes():
    strict = QUEST([Site("penultimate", KMeansSupervision(6), match="pool")])
    distiller = a_distiller(strict, "unequal").fit(a_stream())
    x, y = images(3, size=(20, 20))
    with pytest.raises(UnsupportedPair, match=r"the teacher's map at 'penultimate' is 5x5 and the student's 3x3"):
        distiller(Batch(x, y))


# ------------------------------------------------------------------------------------------------ recipes


def site(**table) -> dict:
    return {"sites": {"penultimate": table}}


@pytest.mark.parametrize(
    ("method", "table", "sentences"),
    [
        (KD, {"temperature": 4, "alfa": 1}, [r"kd has no key 'temperature' \(nearest: T, ", r"kd has no key 'alfa'"]),
        (QUEST, {**site(), "site": 1}, [r"quest has no key 'site' \(nearest: sites\)"]),
        (
            LetKD,
            site(alfa=1, scale=3),
            [r"sites.penultimate has no key 'alfa' \(nearest: alpha", r"has no key 'scale' \(nearest: scale_"],
        ),
        (
            LetKD,
            site(supervision={"k": 3, "Tau": 1}),
            [r"sites.penultimate.supervision has no key 'k'", r"no key 'Tau' \(nearest: tau"],
        ),
        (
            LetKD,
            site(supervision={"kind": "means"}),
            [r"sites.penultimate.supervision.kind is 'means'; the kinds are kmeans, conv3x3, subclass"],
        ),
        (
            LetKD,
            {"sites": {"penultimate": {"alfa": 1, "supervision": {"k": 3}}, "intermediate": {"gamma": 1}}, "site": {}},
            [
                r"letkd has no key 'site'",
                r"penultimate has no key 'alfa'",
                r"supervision has no key 'k'",
                r"intermediate has no key 'gamma'",
            ],
        ),
    ],
)
def test_unknown_keys_of_a_recipe_are_named_all_at_once(method, table, sentences):
    with pytest.raises(RecipeError) as error:
        method.from_recipe(table)
    for sentence in sentences:
        error.match(sentence)


@pytest.mark.parametrize(
    "table", [{}, {"sites": {}}, {"sites": ["penultimate"]}, site(supervision="kmeans"), {"sites": {"penultimate": 3}}]
)
def test_a_recipe_without_proper_sites_gets_a_sentence(table):
    with pytest.raises(LetkdError, match=r"site"):
        LetKD.from_recipe(table)


def test_a_recipe_makes_what_it_says():
    method = LetKD.from_recipe(
        {
            "sites": {
                "intermediate": {"alpha": 0.2, "supervision": {"kind": "subclass", "K": 4, "r": 9}},
                "penultimate": {"scale_omega": 2.0, "supervision": {"K": 32, "tau": 0.5}},
                "stage1": {"supervision": {"kind": "conv3x3"}},
            }
        }
    )
    inter, penult, stage = method.sites.values()
    assert (inter.role, inter.alpha, inter.supervision.K, inter.supervision.r) == ("intermediate", 0.2, 4, 9)
    assert isinstance(inter.supervision, SubclassSupervision)
    assert (penult.scale_omega, penult.alpha, penult.supervision.K, penult.supervision.tau) == (2.0, 1.0, 32, 0.5)
    assert isinstance(penult.supervision, KMeansSupervision)
    assert isinstance(stage.supervision, ConvSupervision)
    assert KD.from_recipe({"T": 2}).T == 2.0
