"""Two real processes on one run: the same as one process, killed and restarted or not."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import letkd.training.loop as loop
from letkd.distributed.sync_bn import sync_batch_norms, unsync_batch_norms
from letkd.errors import RecipeError
from letkd.models.weights import read_state_dict
from letkd.recipes import resolve
from letkd.supervision.stats import ClassMoments, Reservoir
from letkd.training.fabric import processes_from
from letkd.training.trackers import scalars
from tests.support.methods import METHODS
from tests.support.pair import a_distiller, same_state
from tests.support.runs import BOTH, MIXED, images_alone, recipe_for, same_end, save_pictures

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.two_processes"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
EXACT = ("train.precision=64-true", "train.sync_bn=true")


def torchrun(recipes: Path, out: Path, *deaths: str, restarts: int = 0) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [sys.executable, *launcher, "-m", PROGRAM, str(recipes), str(out), *deaths]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)


def srun(recipes: Path, out: Path) -> list[str]:
    """Two nodes of one process each, by the variables that SLURM's srun gives its tasks; what each said."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "letkd", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    slurm |= {"SLURM_NNODES": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", PROGRAM, str(recipes), str(out)]
    tasks = []
    for rank in "01":
        own = {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "RANK": rank}  # RANK is for the program, which names itself
        tasks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT | slurm | own))
    return [task.communicate(timeout=300)[0] for task in tasks]


def write_recipes(folder: Path, recipes: dict) -> Path:
    folder.mkdir()
    for name, recipe in recipes.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, teacher):
    folder = tmp_path_factory.mktemp("processes")
    plain = {name: recipe_for(name, teacher) for name in ("ce", "crd", "letkd-2", "letkd-2-01")}
    exact = {f"exact-{name}": recipe_for(name, teacher, *EXACT) for name in ("letkd-2", "tdd")}
    exact["exact-kd-mixed"] = recipe_for("kd", teacher, *EXACT, *MIXED)
    exact["exact-kd-cached"] = recipe_for("kd", teacher, *EXACT, "train.cache_views=2")
    exact["exact-unlabelled"] = recipe_for("letkd-2", teacher, *EXACT, *BOTH)
    exact["exact-images"] = images_alone("letkd-1", teacher, save_pictures(folder / "pictures"), *EXACT)
    recipes = write_recipes(folder / "recipes", {**plain, **exact})
    done = torchrun(recipes, folder / "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("rank")]
    for name in (*plain, *exact):
        results = {line[1]: line[3] for line in said if line[2] == name}
        assert results.keys() == {"0", "1"}
        assert results["0"] == results["1"], "the processes disagree about the accuracy"
    return folder, {**plain, **exact}


@pytest.mark.storm
def test_killed_processes_restart_and_end_with_the_same_bits(whole):
    """Each recipe loses one of its processes at a random moment, and the first in the middle of a random write, or about its renaming."""
    folder, _ = whole
    names, dice, deaths = ("crd", "letkd-2"), random.Random(6), []
    for name in names:
        deaths.append(f"{dice.randrange(2)}:{name}:{dice.uniform(0.05, 1.0):.2f}:moment")
        deaths.append(f"0:{name}:{dice.randrange(3, 12)}:{dice.choice(['fsync', 'before', 'after'])}")
    done = torchrun(
        write_recipes(folder / "two", {name: whole[1][name] for name in names}), folder / "killed", *deaths, restarts=8
    )
    assert done.returncode == 0, done.stderr[-3000:]
    happened = sorted(path.name for path in (folder / "killed").glob("?-*-*-*"))
    assert len(happened) >= 3, f"hardly a storm: {happened}"  # a run may be over before its moment comes
    for name in names:
        same_end(folder / "whole" / name, folder / "killed" / name, pythons_stream=True)


@pytest.mark.parametrize(
    "name", ["exact-letkd-2", "exact-tdd", "exact-kd-mixed", "exact-kd-cached", "exact-unlabelled", "exact-images"]
)
def test_two_processes_are_one_process_at_the_same_global_batch(name, whole):
    """In float64, with BN over both: fits, losses, weights, statistics, evaluation."""
    folder, recipes = whole
    loop.train(recipes[name], folder / f"one-{name}")
    one, two = folder / f"one-{name}", folder / "whole" / name
    for part in ("student.safetensors", *(f"supervision/{path.name}" for path in (one / "supervision").glob("*.safetensors"))):
        a, b = (read_state_dict(path / part) for path in (one, two))
        for key in a:
            torch.testing.assert_close(
                b[key], a[key], rtol=1e-5, atol=1e-7, msg=lambda text, at=f"{part} {key}": f"{at}: {text}"
            )
    rows = [loop.RunFolder(path, recipes[name]).rows() for path in (one, two)]
    for mine, theirs in zip(*rows, strict=True):
        one_row, two_row = ({name: value for name, value in scalars(row) if name != "seconds"} for row in (mine, theirs))
        assert two_row == pytest.approx(one_row, rel=1e-5)
    results = [loop.RunFolder(path, recipes[name]).result for path in (one, two)]
    assert results[0].last_test == results[1].last_test


def test_a_process_that_fails_ends_the_run_with_its_own_traceback(whole):
    folder, recipes = whole
    done = torchrun(write_recipes(folder / "alone", {"ce": recipes["ce"]}), folder / "failed", "1:ce:2:raise")
    assert done.returncode != 0
    assert "RuntimeError: rank 1 has had enough" in done.stderr


def test_slurm_gives_what_torchrun_gives(whole):
    folder, recipes = whole
    said = srun(write_recipes(folder / "slurm-recipes", {"ce": recipes["ce"]}), folder / "slurm")
    assert all(f"rank {rank} ce " in text for rank, text in enumerate(said)), said
    assert all(f"group of rank {rank}: closed" in text for rank, text in enumerate(said)), said
    same_end(folder / "whole" / "ce", folder / "slurm" / "ce", pythons_stream=True)


def test_the_launchers_variables():
    assert processes_from({}) == (1, 1)
    assert processes_from({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "RANK": "3"}) == (4, 2)
    assert processes_from({"SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2"}) == (8, 2)
    assert processes_from({"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "8"}) == (1, 1)  # within a job, not by srun


def test_a_batch_that_cannot_be_shared_is_told(teacher):
    recipe = resolve("digits/tiny/ce", settings=["data.batch_size=15"])
    with pytest.raises(RecipeError, match=r"data\.batch_size is 15, which cannot be divided evenly among 2 processes"):
        loop.train_loader(recipe, loop.read_data(recipe), rank=0, world=2)


def in_two(work, tmp_path: Path) -> list:
    """What `work(rank)` returns in each of two processes."""
    spawn(_enter, args=(work, str(tmp_path)), nprocs=2)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def _enter(rank: int, work, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def maps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, 2, 2, generator=generator), torch.arange(40) % 3, torch.arange(40)


def _gather(rank: int) -> dict:
    f, y, index = maps()
    mine = slice(0, 25) if rank == 0 else slice(25, 40)  # not the same number
    out = {}
    for name, capacity in (("small", 7), ("large", 1000)):
        reservoir = Reservoir(capacity, groups=3, seed=5)
        reservoir.add(f[mine], y[mine], index[mine])
        merged = Reservoir.of_all(reservoir)
        out[name], out[f"{name} y"] = merged.sample()
        out[f"{name} seen"] = merged.seen
    only = Reservoir(9, seed=1)
    only.add(f, torch.zeros_like(y), index)
    out["one has none"] = Reservoir.of_all(only if rank else None).sample()[0]
    moments = ClassMoments.zeros(3, 3)
    moments.add(f[mine], y[mine])
    both = ClassMoments.of_all(moments)
    return out | {"n": both.n, "sums": both.sums, "second": both.second}


def test_samples_and_moments_of_two_are_those_of_one(tmp_path):
    f, y, index = maps()
    for held in in_two(_gather, tmp_path):
        for name, capacity in (("small", 7), ("large", 1000)):
            one = Reservoir(capacity, groups=3, seed=5)
            one.add(f, y, index)
            rows, group = one.sample()
            assert torch.equal(held[name], rows)
            assert torch.equal(held[f"{name} y"], group)
            assert torch.equal(held[f"{name} seen"], one.seen)
        only = Reservoir(9, seed=1)
        only.add(f, torch.zeros_like(y), index)
        assert torch.equal(held["one has none"], only.sample()[0])
        moments = ClassMoments.zeros(3, 3)
        moments.add(f, y)
        torch.testing.assert_close(held["n"], moments.n)
        torch.testing.assert_close(held["sums"], moments.sums)
        torch.testing.assert_close(held["second"], moments.second)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: its forward pass contains dropout and activation."""

    __module__ = "timm.layers.norm_act"

    def __init__(self, d: int):
        super().__init__(d)
        self.drop, self.act = nn.Identity(), nn.Hardswish()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


class Named(nn.BatchNorm2d):
    """With nothing of its own."""


class Doubled(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _evaluated(rank: int) -> dict:
    distiller = a_distiller(METHODS["fitnet"]())
    for buffer in distiller.buffers():
        buffer.add_(rank)  # after a step, each process has its own statistics
    loop._Run._same_batch_norms(SimpleNamespace(distiller=distiller))  # pyright: ignore[reportArgumentType]
    return dict(distiller.state_dict())


def test_before_an_evaluation_batch_norms_of_student_and_adapters_are_those_of_the_first_process(tmp_path):
    one, two = in_two(_evaluated, tmp_path)
    assert any(name.startswith("methods.") and name.endswith("running_mean") for name in one)
    assert same_state(one, two)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), BatchNormAct2d(4), Named(4))
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(16)).double()


def test_a_batch_norm_with_another_forward_pass_is_refused():
    with pytest.raises(
        RecipeError, match=r"train\.sync_bn: .*Doubled has a forward pass of its own, which cannot be synchronised"
    ):
        sync_batch_norms(nn.Sequential(Doubled(3)))


def _synced(rank: int) -> dict:
    f, _, _ = maps()
    model = net()
    sync_batch_norms(model)
    x = f.double()[:25] if rank == 0 else f.double()[25:]
    x.requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.shape[1]) ** 3).square().sum().backward()
    unsync_batch_norms(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "state": dict(model.state_dict()), "grads": grads, "type": type(model[1]).__name__}


def test_batch_norm_over_two_is_that_of_one(tmp_path):
    f, _, _ = maps()
    model, x = net(), f.double().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.shape[1]) ** 3).square().sum().backward()
    two = in_two(_synced, tmp_path)
    torch.testing.assert_close(torch.cat([held["y"] for held in two]), y)
    torch.testing.assert_close(torch.cat([held["x"] for held in two]), x.grad)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(two[0]["grads"][name] + two[1]["grads"][name], parameter.grad)
    for held in two:
        assert held["type"] == "BatchNorm2d"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(held["state"][name], value)
