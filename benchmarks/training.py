"""Cost of EMA, clipping and a schedule in a training step of `letkd train`.

python benchmarks/training.py [--student resnet20] [--batch 64] [--rounds 12] [--check | --record]
"""

from collections.abc import Callable

import torch
from lightning_fabric import Fabric

import letkd
from letkd.recipes import resolve
from letkd.recipes.schedule import lr_factor
from letkd.training.steps import Steps
from letkd.training.tally import Tally
from timing import begin, compare_with_recorded, device_title, interleaved, parser, show

EPOCH = 1000  # steps
WAYS = {
    "plain": [],
    "clip": ["optim.clip=5.0"],
    "EMA": ["train.ema=0.999"],
    "cosine": ["schedule=cosine", "warmup=0.1"],
    "EMA, clip, cosine": ["train.ema=0.999", "optim.clip=5.0", "schedule=cosine", "warmup=0.1"],
}


def stepper(student: str, batch: letkd.Batch, settings: list[str]) -> Callable[[], None]:
    recipe = resolve("cifar100/rn56-rn20/ce", settings=["lr=1e-7", *settings])
    torch.manual_seed(0)
    steps = Steps(Fabric(accelerator="auto", devices=1), letkd.Distiller(letkd.create_model(student, num_classes=100)), recipe)
    steps.distiller.checks, steps.model.training = False, True
    batch, tally, done = batch.to(steps.fabric.device), Tally(), iter(range(1_000_000))

    def step() -> None:
        k = next(done)
        taken = steps.take(batch, lr_factor(k, recipe, EPOCH), done=k % EPOCH, of=EPOCH)
        tally.add(taken, batch.y, steps.norms, steps.gradients)

    return step


def main() -> None:
    arguments = parser(__doc__, rounds=12)
    arguments.add_argument("--student", default="resnet20")
    arguments.add_argument("--batch", type=int, default=64)
    args = begin(arguments)
    batch = letkd.Batch(torch.randn(args.batch, 3, 32, 32), torch.arange(args.batch) % 100)
    times = interleaved({way: stepper(args.student, batch, settings) for way, settings in WAYS.items()}, args.rounds)
    rows = [[way, f"{1e3 * t:.1f}", f"{100 * (t / times['plain'] - 1):+.1f} %"] for way, t in times.items()]
    show(f"a step of {args.student}, batch {args.batch}; {device_title()}", ["training", "ms", "more than plain"], rows)
    compare_with_recorded(
        args, "training", {f"{way} / plain": t / times["plain"] for way, t in times.items() if way != "plain"}
    )


if __name__ == "__main__":
    main()
