"""Models as people bring them: what works, and the sentence that the rest gets, from the Distiller and from `letkd taps`."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import letkd.methods as methods
from letkd.deploy.runners import with_size
from letkd.distiller import Distiller
from letkd.distiller.facts import Facts
from letkd.errors import LetkdError
from letkd.models import load_weights, save_weights
from letkd.report.tap_table import inspect_taps
from letkd.taps import check_model
from tests.support.pair import SIZE, Net, a_net, images

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Using a non-tuple:UserWarning")

X = torch.zeros(1, 3, *SIZE)
SITE = {"penultimate": "last"}


class Wraps(Net):
    """A network whose answer or arguments are not the plain ones."""

    def __init__(self, answer=lambda logits: logits):
        super().__init__(4)
        self.answer = answer

    def forward(self, x: Tensor):
        return self.answer(super().forward(x))


class TakesDict(Net):
    def forward(self, batch):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(batch["pixels"])


class TakesTwo(Net):
    def forward(self, x, mask):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x * mask)


class TakesMore(Net):
    def forward(self, x, labels=None, *, scale=1.0):
        return super().forward(x * scale)


class Twice(Net):
    """The last stage runs twice: the same weights, deeper."""

    def __init__(self):
        super().__init__(4)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.alias = self.last

    def forward(self, x):
        return self.fc(self.last(self.alias(self.first(x))).mean(dim=(2, 3)))


class Tokens(nn.Module):
    """A small vision transformer."""

    def __init__(self, num_classes: int = 3):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(dim=1))


class Constant(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))


def functional() -> nn.Module:
    """Pooling and flattening are functions, not modules."""
    return Net(4)


def sequential() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    return nn.Sequential(OrderedDict(last=body, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(8, 3)))


def lazy() -> nn.Module:
    return nn.Sequential(OrderedDict(last=nn.LazyConv2d(8, 3, 4, 1), flat=nn.Flatten(), fc=nn.LazyLinear(3)))


def compiled_in_place() -> nn.Module:
    net = Net(4)
    net.compile()
    return net


WORKS = {
    "functional pooling": functional,
    "a Sequential": sequential,
    "more arguments, with defaults": lambda: TakesMore(4),
    "an answer with logits": lambda: Wraps(lambda logits: SimpleNamespace(logits=logits, loss=None)),
    "a dict with logits": lambda: Wraps(lambda logits: {"logits": logits, "features": None}),
    "lazy, after a first run": lambda: [net := lazy(), net(X)][0],
}

REFUSED = {
    "takes a dict": (
        lambda: TakesDict(4),
        r"TakesDict failed on a tensor \[1, 3, 16, 16\] with IndexError: .*only argument; .*wrap",
    ),
    "takes two": (lambda: TakesTwo(4), r"TakesTwo failed on a tensor .* with TypeError: .*'mask'.*only argument; .*wrap"),
    "DataParallel": (lambda: nn.DataParallel(Net(4)), r"wrapped in DataParallel; pass its `\.module`, and wrap the Distiller"),
    "torch.compile": (
        lambda: torch.compile(Net(4)),
        r"OptimizedModule is compiled, .*pass the uncompiled model",
    ),
    "compiled in place": (compiled_in_place, r"Net is compiled, .*pass the uncompiled model"),
    "TorchScript": (
        lambda: torch.jit.trace(sequential().eval(), X),
        r"is TorchScript, in which nothing can be read or added",
    ),
    "a part in TorchScript": (
        lambda: nn.Sequential(OrderedDict(last=torch.jit.trace(nn.ReLU(), X), flat=nn.Flatten(), fc=nn.Linear(768, 3))),
        r"module 'last' of Sequential is TorchScript",
    ),
    "lazy": (lazy, r"Sequential has parameters without a shape \(last\.weight\); run it once on an input"),
    "half": (
        lambda: Net(4).half(),
        r".* with RuntimeError: .*; its parameters are float16 and the images are float32; call model\.float",
    ),
    "bfloat16": (lambda: Net(4).bfloat16(), r"its parameters are bfloat16 and the images are float32; call model\.float\(\)"),
}

# What can be looked at by `letkd taps`, but not learn or teach as it is.
NO_LOGITS = {
    "a tuple": (lambda logits: (logits, logits), "it returned a tuple; wrap it so that it returns logits"),
    "a list": (lambda logits: [logits], "it returned a list; wrap it so that it returns logits"),
    "a dict": (lambda logits: {"out": logits}, "it returned a dict with the keys out; wrap it so that it returns logits"),
    "a dict whose logits are a map": (
        lambda logits: {"logits": logits[..., None]},
        r"it returned a tensor \[1, 3, 1\] under 'logits'",
    ),
}


def distil(student: nn.Module, teacher: nn.Module, method: methods.Method, site=SITE) -> Distiller:
    return Distiller(student, teacher, method, student_taps=site, teacher_taps=SITE, example=X)


@pytest.fixture
def letkd_taps(monkeypatch, letkd):
    """`letkd taps` on a model that a test makes: exit code and what was printed."""

    def run(model: nn.Module):
        monkeypatch.setattr("letkd.models.create_model", lambda name, *, num_classes: model)
        code, out, err = letkd("taps", "own.py:model", "--input", "16x16")
        return code, out + err

    return run


@pytest.mark.parametrize("name", WORKS)
def test_what_works(name, letkd_taps):
    x, y = images(6)
    distiller = distil(WORKS[name](), a_net(5, seed=1), methods.quest(4)).fit([(x, y)])
    distiller((x, y)).loss.backward()
    assert all(parameter.grad is not None for parameter in distiller.student.parameters())
    exported = distiller.export()
    assert type(exported) is type(distiller.student)
    code, said = letkd_taps(WORKS[name]())
    assert code == 0, said
    assert "--tap penultimate=last" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name, letkd_taps):
    make, sentence = REFUSED[name]
    for student, teacher in ((make(), a_net(4, seed=0)), (a_net(4, seed=0), make())):
        with pytest.raises(LetkdError, match=sentence) as caught:
            distil(student, teacher, methods.quest(4))
        assert "\n" not in str(caught.value)
    code, said = letkd_taps(make())
    assert (code, said.count("\n")) == (2, 1)
    with pytest.raises(LetkdError, match=sentence):
        inspect_taps(make(), (3, *SIZE))


@pytest.mark.parametrize(("size", "taps"), [(16, "last"), ((16, 16), {"last": 3})])
def test_attributes_of_our_names_may_mean_something_else(size, taps, letkd_taps):
    def make(seed: int = 0) -> Net:
        net = a_net(4, seed=seed)
        net.input_size, net.taps = size, taps
        return net

    x, y = images(6)
    distil(make(), make(seed=1), methods.quest(4)).fit([(x, y)])((x, y)).loss.backward()
    assert letkd_taps(make())[0] == 0
    assert inspect_taps(make()).image == (3, 224, 224)
    assert with_size(Facts(num_classes=3), make()) == Facts(num_classes=3)


@pytest.mark.parametrize("name", NO_LOGITS)
def test_answers_that_are_no_logits(name, letkd_taps):
    answer, sentence = NO_LOGITS[name]
    with pytest.raises(LetkdError, match=rf"Wraps must return logits \[b C\], but {sentence}"):
        distil(Wraps(answer), a_net(4, seed=0), methods.KD())
    assert letkd_taps(Wraps(answer))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DataParallel", "torch.compile", "TorchScript"])
def test_a_teacher_that_is_only_run_may_be_wrapped(name):
    teacher, (x, y) = REFUSED[name][0](), images(6)
    if name == "torch.compile":
        teacher = torch.compile(Net(4), backend="eager")
    step = Distiller(a_net(4, seed=0), teacher, methods.KD(), example=X)((x, y))
    assert set(step.terms) == {"ce", "kd"}


def test_a_module_that_runs_twice_is_no_site_and_is_marked(letkd_taps):
    with pytest.raises(
        LetkdError, match=r"module 'last' of Twice was computed twice in one forward pass; name a module that runs once"
    ):
        distil(Twice(), a_net(4, seed=0), methods.letkd1(4))
    with pytest.raises(LetkdError, match=r"module 'alias' of Twice was computed twice"):
        distil(Twice(), a_net(4, seed=0), methods.letkd1(4), {"penultimate": "alias"})
    x, y = images(6)
    distiller = distil(Twice(), a_net(4, seed=0), methods.letkd1(4), {"penultimate": "first"}).fit([(x, y)])
    distiller((x, y)).loss.backward()
    code, said = letkd_taps(Twice())
    assert code == 0
    (line,) = [line for line in said.splitlines() if line.startswith("last ")]
    assert "runs 2 times: cannot have a tap; the same module as alias" in line
    (proposed,) = [line for line in said.splitlines() if line.startswith("as student")]
    assert "--tap penultimate=first " in proposed
    assert "last" not in proposed, "what runs twice is not proposed"


def test_tokens_are_no_map_until_they_are_named_as_tokens(letkd_taps):
    teacher = a_net(4, seed=0)
    for path in ("blocks", "norm"):
        sentence = (
            rf"'{path}' gives \[b 16 8\], and a map \[b d h w\] is needed; for patch tokens \[b n d\] write {path}:tokens"
        )
        with pytest.raises(LetkdError, match=sentence):
            distil(Tokens(), teacher, methods.letkd1(4), {"penultimate": path})
    distil(Tokens(), teacher, methods.KD(), {})(images(6)).loss.backward()
    code, said = letkd_taps(Tokens())
    assert code == 0
    assert "--tap penultimate=norm:tokens --tap intermediate=blocks.1:tokens" in said
    distil(Tokens(), teacher, methods.letkd1(4), {"penultimate": "norm:tokens"}).fit([images(6)])(images(6)).loss.backward()


def test_no_parameters():
    with pytest.raises(LetkdError, match=r"the student Constant has no trainable parameters"):
        Distiller(Constant(), a_net(4, seed=0), methods.KD(), example=X)
    with pytest.raises(LetkdError, match=r"the student Constant has no trainable parameters"):
        Distiller(Constant())
    Distiller(a_net(4, seed=0), Constant(), methods.KD(), example=X)(images(6)).loss.backward()


def test_weights_do_not_go_into_lazy_layers(tmp_path):
    save_weights(sequential(), tmp_path / "w.safetensors")
    with pytest.raises(LetkdError, match=r"has parameters without a shape"):
        load_weights(lazy(), tmp_path / "w.safetensors")


def test_check_model_lets_plain_models_pass():
    for make in WORKS.values():
        check_model(make())
