"""Whether a run can go on as a longer one."""

from letkd.recipes.schema import Recipe
from letkd.train.optim import lr_factor

MOST_STEPS = 200_000  # looked at: what is compared are rates per step, as schedules give them for so many steps in all


def why_not_extended(held: Recipe, asked: Recipe) -> str | None:
    """Why a run of `held` is not the beginning of one of `asked`; None where it is: the same rates at every step that `held` has."""
    epochs = held.train.epochs
    if asked.train.epochs <= epochs:
        return f"it has {epochs} epochs, and {asked.train.epochs} are not more"
    steps = max(1, MOST_STEPS // epochs)
    for done in range(epochs * steps):
        before, after = lr_factor(done, held, steps), lr_factor(done, asked, steps)
        if before != after:
            keep = f"; keep them with --set optim.milestones={held.optim.milestones}" if held.optim.milestones else ""
            return (
                f"with {asked.train.epochs} epochs its rates would have been others: {before * held.optim.lr:g} became "
                f"{after * held.optim.lr:g} in epoch {done // steps + 1}"
                f"{keep if held.optim.schedule == 'milestones' else ''}"
            )
    return None
