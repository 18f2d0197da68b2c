"""The fused layer and loss against the plain ones: the same numbers, statistics and gradients, and nothing of K channels in between."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from letkd.distributed.sync_bn import sync_batch_norms
from letkd.errors import DataError
from letkd.functional import pixel_kl, pixels
from letkd.layer import KDLayer, fused
from letkd.methods import LetKD, Site, letkd1, quest
from letkd.methods.per_pixel import PerPixelMethod
from letkd.methods.quest_kd import QUEST
from letkd.supervision import KMeansSupervision
from letkd.supervision.kmeans import largest_entries, soft_assign
from letkd.supervision.labels import Entries, Rows, Table, label_kl
from letkd.taps import Tap, Taps
from tests.support.methods import METHODS
from tests.support.pair import a_distiller, a_stream, same_state, steps

d, K = 5, 11


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Seven pixels at a time, so that no map of these tests is a whole number of chunks."""
    monkeypatch.setattr(fused, "_chunk", lambda x, K: 7)


def layers(dtype=torch.float64, **options) -> tuple[KDLayer, KDLayer]:
    """A plain layer as after training, and its fused twin."""
    plain = KDLayer(d, K, **options).to(dtype)
    for name, parameter in plain.named_parameters():
        nn.init.uniform_(parameter, *((0.5, 1.5) if name in ("bn.weight", "omega.scale") else (-1.0, 1.0)))
    plain.bn.running_mean.normal_(std=0.3)
    plain.bn.running_var.uniform_(0.5, 1.5)
    twin = copy.deepcopy(plain)
    twin.fused = True
    return plain, twin


def a_map(b=2, h=3, w=4, dtype=torch.float64) -> torch.Tensor:
    x = torch.randn(b, d, h, w, dtype=dtype)
    x[0, :, 0, 0] = 0  # as behind a ReLU
    return x


def run(layer: KDLayer, x: torch.Tensor, p_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x̂ and the loss of a layer in either form."""
    if not layer.fused:
        x_hat, seen = Taps(layer, {"a": Tap("omega")})(x)
        return x_hat, pixel_kl(p_T, seen["a"])
    x_hat, seen = Taps(layer, {"log_Z": Tap("log_Z")})(x)
    return x_hat, label_kl(Rows(pixels(p_T)), x, layer.omega.kernels(), seen["log_Z"])


def labels_for(x: torch.Tensor) -> torch.Tensor:
    b, _, h, w = x.shape
    return torch.softmax(2 * torch.randn(b, K, h, w, dtype=x.dtype), dim=1)


def compare(plain: KDLayer, twin: KDLayer, x: torch.Tensor, **tolerance) -> None:
    p_T, weight = labels_for(x), torch.randn_like(x)
    results = []
    for layer in (plain, twin):
        leaf = x.clone().requires_grad_()
        x_hat, kl = run(layer, leaf, p_T)
        parameters = dict(layer.named_parameters())
        gradients = torch.autograd.grad((x_hat * weight).sum() + 3 * kl, [leaf, *parameters.values()], allow_unused=True)
        results.append(
            {"x_hat": x_hat, "kl": kl, **dict(zip(["x", *parameters], gradients, strict=True)), **layer.state_dict()}
        )
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert (value is None) == (results[1][name] is None), name
        if value is not None:
            torch.testing.assert_close(results[1][name], value, **tolerance, msg=lambda told, name=name: f"{name}: {told}")


EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("options", [{}, {"alpha": 0.3}, {"normalize_value_input": False}, {"alpha": 0.0}, {"alpha": -2.0}])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_outputs_statistics_and_gradients_are_those_of_the_plain_layer(mode, options):
    plain, twin = (layer.train(mode == "train") for layer in layers(**options))
    compare(plain, twin, a_map(), **EXACT)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 1), (7, 1, 1), (2, 7, 7)])
def test_any_batch_and_map(shape):
    plain, twin = layers()
    compare(plain, twin, a_map(*shape), **EXACT)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 7, 7), (1, 3, 3)])
def test_on_several_threads_each_with_rows_of_its_own(monkeypatch, threads, shape):
    # 24 pixels are whole chunks of whole lanes; of 98 two are left for a chunk of fewer; a chunk of one is cut no further
    monkeypatch.setattr(fused, "_chunk", lambda x, K: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(*layers(), a_map(*shape), rtol=1e-9, atol=1e-9)
    finally:
        torch.set_num_threads(before)


def test_in_single_precision_within_its_rounding():
    plain, twin = layers(torch.float32)
    compare(plain, twin, a_map(b=6, h=8, w=8, dtype=torch.float32), rtol=1e-4, atol=2e-5)


def test_far_from_the_origin_the_variance_does_not_drown():
    """Pixels that hardly differ: their second moment about 0 would lose all digits of the variance."""
    plain, twin = layers(torch.float32)
    compare(plain, twin, 1 + 1e-2 * torch.randn(8, d, 4, 4), rtol=1e-2, atol=1e-2)


def test_running_statistics_as_a_plain_average():
    plain, twin = layers()
    plain.bn.momentum = twin.bn.momentum = None
    for _ in range(3):
        x = a_map()
        plain(x)
        twin(x)
    assert int(twin.bn.num_batches_tracked) == 3
    torch.testing.assert_close(twin.bn.running_var, plain.bn.running_var, **EXACT)
    torch.testing.assert_close(twin.bn.running_mean, plain.bn.running_mean, **EXACT)


def test_without_running_statistics_those_of_the_batch_are_used_in_eval_too():
    plain, twin = layers()
    plain.bn, twin.bn = (nn.BatchNorm2d(K, track_running_stats=False).double() for _ in range(2))
    compare(plain.eval(), twin.eval(), a_map(), **EXACT)


def test_pixels_that_match_no_template_get_no_gradient_in_half_precision():
    """Their length is 0: a division by a tiny number instead would overflow in the gradient of ν."""
    x, W = torch.randn(9, 3), torch.randn(4, 3)
    A, B, V = torch.ones(4), torch.tensor([-100.0, -100, -100, -100]), torch.randn(3, 4)
    leaves = [t.requires_grad_() for t in (x, W, A, B, V)]
    v, log_Z = fused._Match.apply(*leaves, True, torch.float16)
    gradients = torch.autograd.grad((v * 65536).sum() + log_Z.sum(), leaves)
    assert not v.any()
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[-1].any()


def test_one_pixel_has_no_statistics():
    with pytest.raises(DataError, match=r"at least two pixels in training but got 1; use a larger batch, or eval\(\)"):
        layers()[1](torch.randn(1, d, 1, 1).double())


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_the_formula(normalize):
    x, W = torch.randn(9, 3).double(), torch.randn(4, 3).double()
    A, B, V = torch.rand(4).double() + 0.5, torch.randn(4).double(), torch.randn(3, 4).double()
    leaves = [t.requires_grad_() for t in (x, W, A, B, V)]
    assert torch.autograd.gradcheck(lambda *t: fused._Match.apply(*t, normalize, torch.float64), leaves)
    assert torch.autograd.gradcheck(lambda x, W: fused._log_Z(x, W, torch.float64), leaves[:2])


def test_only_the_gradients_that_are_asked_for():
    """The loss alone, or the output alone, where the other has no weight."""
    x, p_T = a_map(), labels_for(a_map())
    for part in (0, 1):
        results = []
        for layer in layers():
            torch.manual_seed(1)
            leaf = x.clone().requires_grad_()
            results.append(torch.autograd.grad(run(layer, leaf, p_T)[part].square().sum(), [leaf, layer.omega.weight]))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, **EXACT)


def test_under_autocast_products_are_in_low_precision_and_sums_are_not(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    plain, twin = layers(torch.float32)
    x = a_map(b=8, dtype=torch.float32)
    p_T = labels_for(x)
    exact = run(copy.deepcopy(twin), x, p_T)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.product_dtype(x) == torch.bfloat16
        low = run(twin, x, p_T)
        reference = run(plain, x, p_T)
    (low[0].sum() + low[1]).backward()
    assert twin.omega.weight.grad.isfinite().all()
    for value, full, other in zip(low, exact, reference, strict=True):
        assert value.dtype == torch.float32
        assert not torch.equal(value, full)
        torch.testing.assert_close(value, full, rtol=0.03, atol=0.03)
        torch.testing.assert_close(value, other.float(), rtol=0.06, atol=0.06)


def test_where_the_processor_has_no_bf16_autocast_leaves_the_products_alone(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.product_dtype(torch.zeros(1)) == torch.float32
    assert fused.product_dtype(torch.zeros(1).double()) == torch.float64


@pytest.mark.parametrize("method", [lambda: letkd1(6), lambda: quest(6)])
def test_a_build_of_torch_without_onednn_is_enough(method, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())  # as in the wheels for Macs
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    distiller = a_distiller(method()).fit(a_stream())
    distiller(a_stream()[0]).loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.product_dtype(torch.zeros(1)) == torch.float32


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation gave."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("method", [QUEST, LetKD])
def test_no_tensor_has_a_score_for_every_pixel_and_template(method):
    def largest(fused: bool) -> int:
        distiller = a_distiller(method([Site("penultimate", KMeansSupervision(60, 200.0))]), fused=fused).fit(a_stream())
        with Largest() as seen:
            distiller(a_stream(64, batch=64)[0]).loss.backward()
        return seen.numel

    scores = 64 * 16 * 60
    assert largest(False) >= scores
    assert largest(True) < scores


PIXELWISE = [name for name, make in METHODS.items() if isinstance(make(), PerPixelMethod)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PIXELWISE)
@pytest.mark.parametrize("pair", ["equal", "unequal"])
def test_a_fused_distiller_trains_as_a_plain_one(name, pair):
    plain, other = (a_distiller(METHODS[name](), pair, fused=flag).fit(a_stream()).double() for flag in (False, True))
    assert plain.state_dict().keys() == other.state_dict().keys()
    batches = a_stream()
    for batch in batches:
        batch.x = batch.x.double()
    losses = [steps(d, batches * 2, torch.optim.SGD(d.parameters(), lr=0.02, momentum=0.9)) for d in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # what is left out of p_T is below 1e-7 of its largest
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    other.load_state_dict(plain.state_dict())
    assert same_state(plain.state_dict(), other.state_dict())


def test_without_a_loss_on_its_output_the_layers_other_parameters_get_no_gradient():
    """Zeros instead of None would let weight decay and momentum act on them."""
    untouched = []
    for flag in (False, True):
        distiller = a_distiller(METHODS["letkd-1"](), weights={"ce": 0.0}, fused=flag).fit(a_stream()).train()
        distiller(a_stream()[0]).loss.backward()
        untouched.append({name for name, parameter in distiller.named_parameters() if parameter.grad is None})
    assert untouched[0] == untouched[1]
    assert {"bn.weight", "bn.bias", "nu.weight"} <= {".".join(name.split(".")[-2:]) for name in untouched[1]}


@pytest.mark.slow
def test_what_is_exported_or_compiled_is_the_plain_form():
    distiller = a_distiller(METHODS["letkd-2"]()).fit(a_stream()).eval()
    x = a_stream()[0].x
    shipped = [module for module in distiller.export().modules() if isinstance(module, KDLayer)]
    assert len(shipped) == 2
    assert not any(layer.fused for layer in shipped)
    assert all(layer.fused for layer in distiller.student.modules() if isinstance(layer, KDLayer))
    program = torch.export.export(distiller.student, (x,))  # also of a student that is still at school
    torch.testing.assert_close(program.module()(x), distiller.student(x))


# ------------------------------------------------------------------------------------------------ labels


def test_the_tail_that_is_dropped_changes_the_kl_by_less_than_1e_4():
    """More than rounding, so it is said wherever the fused loss is (docs/deviations.md, D48)."""
    K, size = 4096, (1, 64, 4, 4)
    f, x, rho = (torch.randn(*shape, dtype=torch.float64) for shape in (size, size, (K, 64)))
    omega = 3 * nn.functional.normalize(torch.randn(K, 64, 1, 1, dtype=torch.float64), dim=1)
    a = nn.functional.conv2d(nn.functional.normalize(x, dim=1), omega)
    entries = largest_entries(pixels(f), rho, 0.5, least=1e-7)
    kl = label_kl(entries, x, omega, fused.log_partition(x, omega))
    assert 1e-6 < abs(kl - pixel_kl(soft_assign(f, rho, 0.5), a)) < 1e-4


def test_largest_entries_are_soft_assign_without_its_tail():
    f, rho = torch.randn(2, 4, 3, 5).double(), torch.randn(40, 4).double()
    p_T = pixels(soft_assign(f, rho, 6.0))
    entries = largest_entries(pixels(f), rho, 6.0, least=1e-3, chunk=7)
    assert isinstance(entries, Entries)
    kept = p_T > 1e-3 * p_T.amax(dim=1, keepdim=True)
    expected = p_T * kept
    torch.testing.assert_close(entries.dense(), expected / expected.sum(dim=1, keepdim=True))
    assert len(entries.index) == int(kept.sum()) < p_T.numel() / 8
    torch.testing.assert_close(entries.negative_entropy(), torch.xlogy(entries.dense(), entries.dense()).sum(dim=1))


def test_broad_labels_stay_rows():
    supervision = KMeansSupervision(6, 1e-3).fit([(torch.randn(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64))])
    f_T, y = torch.randn(2, 3, 2, 2), torch.zeros(2, dtype=torch.int64)
    labels = supervision.labels(f_T, y)
    assert isinstance(labels, Rows)
    assert torch.equal(labels.dense(), pixels(supervision.p_T(f_T, y)))


def test_a_table_is_its_rows():
    rows, at = torch.softmax(torch.randn(3, 7), dim=1), torch.tensor([2, 0, 2, 1])
    W = torch.randn(7, 4)
    torch.testing.assert_close(Table(rows, at).mix(W), Rows(rows[at]).mix(W))
    torch.testing.assert_close(Table(rows, at).negative_entropy(), Rows(rows[at]).negative_entropy())


# ------------------------------------------------------------------------------------------------ several processes


def in_step(rank: int, where: str, out: str, torchs_own: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    torch.manual_seed(0)
    _, twin = layers()
    nn.SyncBatchNorm.convert_sync_batchnorm(twin) if torchs_own else sync_batch_norms(twin)
    part = halves()[rank].requires_grad_()
    (twin(part) * weights()[rank]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    torch.save({"x": part.grad, "rows": twin.state_dict(), **gradients}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """Not quite: one process has fewer images."""
    x = torch.randn(5, d, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x[:3].clone(), x[3:].clone()


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    one, two = halves()
    return torch.sin(9 * one), torch.sin(9 * two)


@pytest.mark.processes
@pytest.mark.parametrize("torchs_own", [False, True])
def test_statistics_of_all_processes_are_those_of_the_whole_batch(tmp_path, torchs_own):
    spawn(in_step, args=(str(tmp_path / "meet"), str(tmp_path), torchs_own), nprocs=2)
    told = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    torch.manual_seed(0)
    plain, _ = layers()
    x = torch.cat(halves()).requires_grad_()
    (plain(x) * torch.cat(weights())).sum().backward()
    torch.testing.assert_close(torch.cat([part["x"] for part in told]), x.grad, **EXACT)
    for part in told:
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(part[name], parameter.grad, **EXACT, msg=name)
        for name in ("bn.running_mean", "bn.running_var"):
            torch.testing.assert_close(part["rows"][name], plain.state_dict()[name], **EXACT)
