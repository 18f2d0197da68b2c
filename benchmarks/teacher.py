"""A teacher's forward pass by layout and precision, and what bf16 changes in its outputs.

    python benchmarks/teacher.py [--batch 64] [--rounds 9] [--check | --record]
    python benchmarks/teacher.py --root DATA --teacher-weights resnet56.safetensors [--images 2048] [--K 512] [--tau 0.3]

The unit is one fp32 resnet20 step. The second form also compares the outputs of a trained ResNet-56 on images of CIFAR-10 in bf16
with those in single precision: equal predictions, the KL of KD's targets at T = 4, pixels with the same nearest centre, and the
KL of their labels p_T.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import letkd
from letkd.data import Loader, Split, load_data
from letkd.errors import LetkdError
from letkd.methods import Site
from letkd.supervision import KMeansSupervision
from letkd.taps.fold_bn import fold_teacher
from letkd.training.device import has_bf16
from timing import begin, compare_with_recorded, device_title, interleaved, parser, show

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as the teacher was trained
T = 4.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def distiller_of(args: argparse.Namespace, *, folded: bool = False, last: bool = False, bf16: bool = False) -> letkd.Distiller:
    """A distiller with the teacher in the given form; only the teacher is used."""
    torch.manual_seed(0)
    teacher: nn.Module = letkd.create_model("resnet56_a", num_classes=10, weights=args.teacher_weights).eval()
    if folded:
        teacher = fold_teacher(teacher, teacher.taps, torch.zeros(1, 3, 32, 32))
    method = letkd.methods.QUEST([Site("penultimate", KMeansSupervision(args.K, args.tau))])
    student = letkd.create_model("resnet20", num_classes=10)
    made = letkd.Distiller(student, teacher, [method, letkd.methods.KD(T=T)], bf16_teacher=bf16).to(DEVICE)
    return made.to(memory_format=torch.channels_last) if last else made  # pyright: ignore[reportCallIssue]


def step_of(batch: int) -> Callable[[], None]:
    model = letkd.create_model("resnet20", num_classes=10).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32, device=DEVICE), torch.arange(batch, device=DEVICE) % 10

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kl(p: Tensor, q: Tensor) -> float:
    """Mean KL(p‖q) over all but the second dimension."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q.clamp_min(1e-30))).sum(dim=1).mean().item()


def compare_outputs(args: argparse.Namespace) -> list[list[str]]:
    """Rows of a table: the outputs in bf16 relative to those in single precision."""
    data = load_data("cifar10", root=args.root)
    split = Split(data.train.images[: args.images], data.train.labels[: args.images])
    loader = Loader(split, args.batch, mean=MEAN, std=STD)
    single, low = (distiller_of(args, folded=True, last=True, bf16=bf16) for bf16 in (False, True))
    site = single.fit(loader).fittings()["penultimate"].part
    rows: list[list[float]] = []
    for batch in loader:
        x, y = batch.x.to(DEVICE), batch.y.to(DEVICE)
        one, two = (made.run_teacher(x) for made in (single, low))
        p, q = (site.p_T(features["penultimate"], y) for features in (one, two))
        soft = [(features["logits"] / T).softmax(dim=1) for features in (one, two)]
        same = (one["logits"].argmax(dim=1) == two["logits"].argmax(dim=1)).float().mean().item()
        centre = (p.argmax(dim=1) == q.argmax(dim=1)).float().mean().item()
        rows.append([same, kl(*soft), entropy(soft[0]), centre, kl(p, q), entropy(p)])
    same, kl_kd, h_kd, centre, kl_p, h_p = torch.tensor(rows).mean(dim=0).tolist()
    return [
        ["equal predictions", f"{100 * same:.2f} %", ""],
        [f"KL of KD's targets, T = {T:g}", f"{kl_kd:.1e}", f"entropy {h_kd:.2f}"],
        [f"equal nearest centres, K = {args.K}", f"{100 * centre:.2f} %", ""],
        [f"KL of p_T, τ = {args.tau:g}", f"{kl_p:.1e}", f"entropy {h_p:.2f}"],
    ]


def entropy(p: Tensor) -> float:
    return -torch.xlogy(p, p).sum(dim=1).mean().item()


def main() -> None:
    arguments = parser(__doc__, rounds=9)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--root", type=Path)
    arguments.add_argument("--teacher-weights", type=Path)
    arguments.add_argument("--images", type=int, default=2048)
    arguments.add_argument("--K", type=int, default=512)
    arguments.add_argument("--tau", type=float, default=0.3)
    args = begin(arguments)
    ways = {
        "plain": {},
        "channels-last": {"last": True},
        "folded": {"folded": True},
        "folded, channels-last": {"folded": True, "last": True},
    }
    if has_bf16():
        ways["folded, channels-last, bf16"] = {"folded": True, "last": True, "bf16": True}
    x = torch.randn(args.batch, 3, 32, 32, device=DEVICE)
    cases: dict[str, Callable[[], object]] = {"a step of resnet20 (the unit)": step_of(args.batch)}
    for name, way in ways.items():
        made = distiller_of(args, **way)
        shown = x.contiguous(memory_format=torch.channels_last) if way.get("last") else x
        cases[name] = lambda made=made, shown=shown: made.run_teacher(shown)
    times = interleaved(cases, args.rounds)
    unit, plain = times["a step of resnet20 (the unit)"], times["plain"]
    rows = [[name, f"{1e3 * t:.1f}", f"{t / unit:.2f}", f"{t / plain:.2f}"] for name, t in times.items()]
    show(f"resnet56, forward, batch {args.batch}; {device_title()}", ["way", "ms", "units", "/ plain"], rows)
    compare_with_recorded(args, "teacher", {name: t / unit for name, t in times.items()})
    if args.root is None or args.teacher_weights is None:
        print("outputs in bf16: skipped; name --root and --teacher-weights to compare them")
        return
    try:
        title = f"outputs in bf16, trained ResNet-56, {args.images:,} images of CIFAR-10"
        show(title, ["what", "bf16", ""], compare_outputs(args))
    except LetkdError as error:
        print(f"outputs in bf16: skipped ({error})")


if __name__ == "__main__":
    main()
