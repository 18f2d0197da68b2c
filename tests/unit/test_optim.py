"""Learning rates: against torch's own schedulers, and the promise that a run which ends at zero does."""

import pytest
import torch
from torch import optim
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from letkd.errors import RecipeError
from letkd.recipes import Recipe, resolve
from letkd.train.optim import lr_at

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
    ours = [lr_at(done, recipe_of(schedule, warmup), STEPS) for done in range(EPOCHS * STEPS)]
    assert ours == pytest.approx(by_torch(schedule, steps))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_after_the_last_step_would_be_zero(schedule: str):
    assert lr_at(EPOCHS * STEPS, recipe_of(schedule), STEPS) == pytest.approx(0.0)
    assert lr_at(EPOCHS * STEPS - 1, recipe_of(schedule), STEPS) > 0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(RecipeError, match="schedule"):
        recipe_of("one-cycle")
