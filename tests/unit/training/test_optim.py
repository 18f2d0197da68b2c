"""Learning rates: against torch's own schedulers, and the promise that a run which ends at zero does."""

import pytest
import torch
from torch import optim
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

import letkd
from letkd.errors import RecipeError
from letkd.recipes import Recipe, resolve
from letkd.recipes.schedule import lr_factor
from letkd.training.optim import OPTIMISERS, build_optimizer, freeze

EPOCHS, STEPS = 5, 7


def recipe_of(schedule: str, warmup: float = 0.0) -> Recipe:
    settings = [f"epochs={EPOCHS}", f"schedule={schedule}", f"warmup={warmup}", "milestones=[2, 4]", "gamma=0.3", "lr=0.2"]
    return resolve("digits/tiny/ce", settings=settings)


def by_torch(schedule: str, warmup: int) -> list[float]:
    """The rates that torch's schedulers give, stepped after each step of the optimiser."""
    optimizer = optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    T = EPOCHS * STEPS - warmup
    after: dict[str, LRScheduler] = {
        "milestones": MultiStepLR(optimizer, [2 * STEPS - warmup, 4 * STEPS - warmup], gamma=0.3),
        "linear": LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=T),
        "cosine": CosineAnnealingLR(optimizer, T_max=T),
        "constant": ConstantLR(optimizer, factor=1.0),
    }
    optimizer.param_groups[0]["lr"] = 0.2
    scheduler = after[schedule]
    if warmup:
        rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), end_factor=1.0, total_iters=warmup)
        scheduler = SequentialLR(optimizer, [rise, scheduler], milestones=[warmup])
    rates = []
    for _ in range(EPOCHS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("schedule", ["milestones", "linear", "cosine", "constant"])
def test_rates_are_those_of_torchs_schedulers(schedule: str, warmup: float):
    steps = {0.0: 0, 1.0: STEPS, 0.1: round(0.1 * EPOCHS * STEPS)}[warmup]
    ours = [0.2 * lr_factor(done, recipe_of(schedule, warmup), STEPS) for done in range(EPOCHS * STEPS)]
    assert ours == pytest.approx(by_torch(schedule, steps))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_after_the_last_step_would_be_zero(schedule: str):
    assert 0.2 * lr_factor(EPOCHS * STEPS, recipe_of(schedule), STEPS) == pytest.approx(0.0)
    assert 0.2 * lr_factor(EPOCHS * STEPS - 1, recipe_of(schedule), STEPS) > 0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(RecipeError, match="schedule"):
        recipe_of("one-cycle")


def optimiser_of(*settings: str, student: torch.nn.Module | None = None) -> optim.Optimizer:
    distiller = letkd.Distiller(student or letkd.create_model("resnet8_tiny", num_classes=3))
    return build_optimizer(distiller, resolve("digits/tiny/ce", settings=settings).optim)


def test_the_papers_optimiser_decays_every_parameter():
    (group,) = optimiser_of().param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.05, 0.9, True, 5e-4)


@pytest.mark.parametrize("name", sorted(OPTIMISERS.keys() - {"muon"}))
def test_every_optimiser_of_torch_takes_a_step(name: str):
    student = letkd.create_model("resnet8_tiny", num_classes=3)
    optimiser = optimiser_of(f"optim.name={name}", "weight_decay=0.0", student=student)
    before = student.fc.weight.clone()
    student(torch.randn(4, 3, 8, 8)).sum().backward()
    optimiser.step()
    assert isinstance(optimiser, OPTIMISERS[name])
    assert not torch.equal(student.fc.weight, before)


def test_settings_reach_the_optimiser():
    (group,) = optimiser_of("optim.name=AdamW", "optim.settings.betas=[0.8, 0.9]", "weight_decay=0.1").param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.1)


def test_norms_biases_and_scales_need_not_decay():
    matrices, vectors = sorted(optimiser_of("decay_norms=false").param_groups, key=lambda group: -group["weight_decay"])
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (5e-4, 0.0)
    assert {p.ndim > 1 for p in matrices["params"]} == {True}
    assert {p.ndim > 1 for p in vectors["params"]} == {False}


def test_a_group_has_a_rate_of_its_own_that_follows_the_schedule():
    head, rest = optimiser_of('optim.groups=[{match = "fc.*", lr = 0.5}]').param_groups[::-1]
    assert (head["lr"], len(head["params"]), rest["lr"]) == (0.5, 2, 0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optim.name=adanw"], "optim.name is 'adanw'; nearest: adamw"),
        (["optim.name=lbfgs"], "which needs a closure"),
        (["optim.name=adamw", "optim.settings.beta=1"], r"has the key 'beta', but AdamW takes betas.*nearest: betas"),
        (["optim.name=adamw", "optim.settings.betas=[2.0, 3.0]"], "AdamW does not take .*Invalid beta parameter"),
        (["optim.name=adamw", "optim.settings.betas=3"], "AdamW does not take"),
        (['optim.groups=[{match = "head.*", lr = 1.0}]'], r"no trainable parameter of the student matches 'head\.\*'"),
    ],
)
def test_wrong_optimisers_are_one_sentence(settings: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        optimiser_of(*settings)


def test_what_is_frozen_does_not_move_nor_do_its_statistics():
    student = letkd.create_model("resnet8_tiny", num_classes=3)
    freeze(student, ["bn1.*", "layer1.*"])
    before = {name: value.clone() for name, value in student.state_dict().items()}
    distiller = letkd.Distiller(student).train()
    optimiser = build_optimizer(distiller, resolve("digits/tiny/ce").optim)
    distiller((torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))).loss.backward()
    optimiser.step()
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert not [name for name in moved if name.startswith(("bn1.", "layer1."))]
    assert {"conv1.weight", "layer2.0.bn1.running_mean"} <= moved
    with pytest.raises(RecipeError, match="no parameter of the student matches the pattern 'stem"):
        freeze(student, ["stem.*"])
