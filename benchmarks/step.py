"""Time and peak memory of one training step per method, relative to plain cross-entropy.

    python benchmarks/step.py [--teacher resnet56] [--student resnet20] [--K 4096] [--batch 64] [--rounds 12]
                              [--rows ce,teacher,kd,letkd-1:plain,letkd-1,letkd-1:bf16] [--check | --record]

A row is a method name of `letkd train --method`. `:plain` computes the KD layer and its loss as the paper writes them (default:
fused), `:bf16` runs under autocast; `teacher` is only the teacher's forward pass, as in a step. Every round takes one step of
every row in turn, so that noise of a shared machine affects all rows alike; the table shows medians.
"""

from collections.abc import Callable

import torch

import letkd
from letkd.methods import METHODS
from letkd.recipes import resolve
from timing import begin, compare_with_recorded, device_title, interleaved, parser, peak_memory, show

C = 100
ROWS = ["ce", "teacher", "kd", "fitnet", "at", "ab", "fsp", "sp", "vid", "crd", "dkd", "simkd", "tdd"]
ROWS += ["kd-ls", "dkd-ls", "dist", "reviewkd", "srd", "mlkd"]
ROWS += ["quest:plain", "quest", "letkd-1:plain", "letkd-1", "letkd-2:plain", "letkd-2"]
BF16 = ["ce:bf16", "quest:bf16", "letkd-1:plain:bf16", "letkd-1:bf16", "letkd-2:bf16"]
SITE = "sites.penultimate.supervision"
K_OF = {"quest": f"quest.{SITE}", "letkd-1": f"letkd.{SITE}", "letkd-2": f"letkd.{SITE}"}  # recipe keys of K


def distiller(row: str, teacher: torch.nn.Module, student: str, K: int, *, fused: bool) -> letkd.Distiller:
    """A method with the settings of its recipe and a new student; supervisions are fitted to random images.

    τ = 33 with `scale_free` makes labels as sharp as those of a trained ResNet-56 on CIFAR at τ = 1.
    """
    x = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    stream = [letkd.Batch(x[part], part % C, part) for part in torch.arange(200).split(100)]
    sharp = {"K": K, "scale_free": "true", "tau": 33.0} if row in K_OF else {}
    settings = [f"methods.{K_OF[row]}.{key}={value}" for key, value in sharp.items()]
    recipe = resolve("cifar100/rn56-rn20", method=row, settings=settings)
    methods = [METHODS[name].from_recipe(table) for name, table in recipe.methods.items()]
    weights = recipe.phases[0].weights if recipe.phases else recipe.weights
    torch.manual_seed(0)
    network = letkd.create_model(student, num_classes=C)
    return letkd.Distiller(network, teacher, methods, weights=weights, fused=fused).fit(stream)


def step(made: letkd.Distiller, batch: letkd.Batch, *, bf16: bool) -> Callable[[], None]:
    # A tiny rate: with an untrained teacher, a usual learning rate makes some methods diverge within a few steps.
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-7, momentum=0.9)

    def run() -> None:
        with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = made(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    arguments = parser(__doc__, rounds=12)
    arguments.add_argument("--teacher", default="resnet56")
    arguments.add_argument("--student", default="resnet20")
    arguments.add_argument("--K", type=int, default=4096)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--rows", help="ce first; the default includes bf16 rows if the processor has bf16")
    args = begin(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    native = device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    rows = args.rows.split(",") if args.rows else ROWS + (BF16 if native else [])
    teacher = letkd.create_model(args.teacher, num_classes=C)
    index = torch.arange(args.batch) % 200
    x = torch.randn(args.batch, 3, 32, 32)
    batch = letkd.Batch(x, index % C, index, epoch=20, second=torch.randn_like(x)).to(device)
    cases: dict[str, Callable[[], object]] = {}
    for row in rows:
        name, *how = row.split(":")
        made = distiller("kd" if name == "teacher" else name, teacher, args.student, args.K, fused="plain" not in how)
        made.to(device).train()
        cases[row] = (
            (lambda made=made: made.run_teacher(batch.x)) if name == "teacher" else step(made, batch, bf16="bf16" in how)
        )
    times = interleaved(cases, args.rounds)
    memory = {row: peak_memory(run) for row, run in cases.items()}
    unit, base = times[rows[0]], memory[rows[0]]
    taught = unit + times.get("teacher", float("nan"))
    shown = []
    for row, t in times.items():
        over = "" if row in ("ce", "teacher") else f"{(t - taught) / unit:.2f}"
        shown.append([row, f"{1e3 * t:.0f}", f"{t / unit:.2f}", over, f"{memory[row] / 1e6:.0f}", f"{memory[row] / base:.2f}"])
    show(
        f"{args.teacher} → {args.student}, K={args.K}, batch {args.batch}; {device_title()}",
        ["step", "ms", "units", "over student and teacher", "peak memory (MB)", "memory / first"],
        shown,
    )
    compare_with_recorded(args, "step", {row: t / unit for row, t in times.items()})


if __name__ == "__main__":
    main()
