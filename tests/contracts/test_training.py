"""Every optimiser and every schedule: resumed exactly, and the same in two processes as in one."""

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.progress import set_quiet
from letkd.recipes import Recipe, resolve
from letkd.recipes.schedule import lr_factor
from letkd.training.optim import OPTIMISERS, build_optimizer, set_lr
from letkd.training.state import State, restore_state, save_state
from letkd.training.steps import Steps
from tests.support.pair import a_net, a_stream, same_state

EPOCHS, STEPS = 3, 3
PLAIN = ["weight_decay=1e-3", "lr=0.01", f"epochs={EPOCHS}"]
# Muon takes matrices only, which no network with norms and biases consists of.
WAYS = {name: [f"optim.name={name}", "schedule=linear", "warmup=1"] for name in sorted(OPTIMISERS.keys() - {"muon"})}
WAYS |= {f"sgd, {name}": [f"schedule={name}", "milestones=[1]"] for name in ("milestones", "cosine", "linear", "constant")}
WAYS |= {"own groups": ["optim.name=adamw", "decay_norms=false", 'optim.groups=[{match = "fc.*", lr = 0.1}]', "clip=0.5"]}
WAYS |= {"average": ["train.ema=0.9"], "accumulated": ["train.accumulate=2", "schedule=linear", "train.ema=0.9"]}


def recipe_of(way: str) -> Recipe:
    return resolve("digits/tiny/ce", settings=[*PLAIN, *WAYS[way]])


def some_steps(way: str) -> Steps:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    return Steps(fabric, Distiller(a_net(4, seed=1)), recipe_of(way))


def work_on(steps: Steps, state: State, until: int) -> None:
    """Train from where the state is until so many steps of all epochs are done."""
    while (done := (state.epoch - 1) * STEPS + state.step) < until:
        steps.take(a_stream()[state.step], lr_factor(done, steps.recipe, STEPS), done=state.step, of=STEPS)
        state.step += 1
        if state.step == STEPS:
            state.epoch, state.step = state.epoch + 1, 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_resumes_exactly(way: str, tmp_path):
    whole = some_steps(way)
    work_on(whole, State(), EPOCHS * STEPS)
    stopped, state = some_steps(way), State()
    work_on(stopped, state, STEPS + 2)  # within the second epoch
    assert stopped.can_save(state.step, STEPS)
    save_state(tmp_path, state, stopped)
    resumed = some_steps(way)
    state = restore_state(tmp_path, resumed)
    assert not same_state(resumed.distiller.state_dict(), whole.distiller.state_dict())
    work_on(resumed, state, EPOCHS * STEPS)
    assert same_state(resumed.distiller.state_dict(), whole.distiller.state_dict())
    assert (resumed.average is None) is (whole.average is None)
    if whole.average is not None and resumed.average is not None:
        assert same_state(resumed.average.values, whole.average.values)
        assert not same_state(whole.average.values, {name: whole.distiller.state_dict()[name] for name in whole.average.values})


class WithoutNorms(nn.Module):
    """Whose gradient of a batch is the mean of those of its halves."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).tanh().mean(dim=(2, 3)))


def trained(way: str, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    recipe, distiller = recipe_of(way), Distiller(WithoutNorms().double())
    model = distiller if world == 1 else DistributedDataParallel(distiller)
    optimizer = build_optimizer(distiller, recipe.optim)
    for done in range(EPOCHS * STEPS):
        batch = a_stream()[done % STEPS]
        set_lr(optimizer, lr_factor(done, recipe, STEPS))
        model(Batch(batch.x[rank::world].double(), batch.y[rank::world])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in distiller.named_parameters()}


def work(rank: int, where: str, out: str) -> None:
    torch.set_num_threads(1)
    set_quiet(True)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    torch.save({way: trained(way, rank, 2) for way in WAYS}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.processes
def test_two_processes_train_as_one(tmp_path):
    spawn(work, args=(str(tmp_path / "meet"), str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for way in WAYS:
        assert same_state(one[way], two[way]), way
        for name, value in trained(way).items():
            torch.testing.assert_close(one[way][name], value, rtol=1e-6, atol=1e-9, msg=lambda text, way=way: f"{way}: {text}")
