"""The parts of a letKD step that are not networks: KD layer, labels and loss, plain and fused, in units of one CE step.

    python benchmarks/layer.py [--student resnet20] [--K 4096] [--batch 64] [--rounds 16] [--check | --record]

The unit is one fp32 step of the student with cross-entropy, timed in the same rounds. Maps are 8x8 with 64 channels. The
teacher's features are random, with labels about as sharp as those of a trained ResNet-56 on CIFAR (some 50 per pixel above 1e-7
at τ = 1). Rows in bf16 are omitted if the processor has no bf16 arithmetic, because they would measure its emulation.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

import letkd
from letkd.functional import pixel_kl
from letkd.layer import CosineConv1x1, KDLayer
from letkd.layer.fused import log_partition
from letkd.supervision import KMeansSupervision, SubclassSupervision, Supervision
from letkd.supervision.labels import label_kl
from letkd.taps import Tap, Taps
from timing import begin, compare_with_recorded, device_title, interleaved, parser, peak_memory, show

C, d, SIZE = 100, 64, 8


def features(b: int, y: torch.Tensor) -> torch.Tensor:
    """Pixels around class means, with a variance that makes labels as sharp as those of a trained teacher."""
    means = torch.randn(C, d, generator=torch.Generator().manual_seed(1))
    return 1.6 * (means[y][:, :, None, None] + 0.9 * torch.randn(b, d, SIZE, SIZE)).relu()


def supervisions(K: int) -> dict[str, Supervision]:
    y = torch.arange(800) % C
    stream = [(features(100, part), part) for part in y.split(100)]
    inter = SubclassSupervision(8)
    inter.bind("intermediate", d=d, C=C)
    return {"penultimate": KMeansSupervision(K, iterations=3).fit(stream), "intermediate": inter.fit(stream)}


def site(supervision: Supervision, f_T: torch.Tensor, y: torch.Tensor, *, fused: bool, layer: bool, bf16: bool) -> Callable:
    """One forward and backward of a site: the layer (or QUEST's predictor alone), its labels and its loss."""
    K = supervision.num_labels()
    module = KDLayer(d, K) if layer else CosineConv1x1(d, K, scale=3.0)
    module.to(f_T.device)
    x = torch.randn_like(f_T).relu().requires_grad_()
    weight = torch.randn_like(x) / x.numel()
    if isinstance(module, KDLayer):
        module.fused = fused
        taps = Taps(module, {"read": Tap("log_Z" if fused else "omega")})

    def run() -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=bf16):
            if isinstance(module, KDLayer):
                x_hat, seen = taps(x)
                read, omega = seen["read"], module.omega
            else:
                read = log_partition(x, module.kernels()) if fused else module(x)
                x_hat, omega = x, module
            if fused:
                kl = label_kl(supervision.labels(f_T, y), x, omega.kernels(), read)
            else:
                kl = pixel_kl(supervision.p_T(f_T, y), read)
            loss = kl + (x_hat * weight).sum()
        loss.backward()
        module.zero_grad(set_to_none=True)
        x.grad = None

    return run


def main() -> None:
    arguments = parser(__doc__, rounds=16)
    arguments.add_argument("--student", default="resnet20")
    arguments.add_argument("--K", type=int, default=4096)
    arguments.add_argument("--batch", type=int, default=64)
    args = begin(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    native = device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    y = torch.arange(args.batch) % C
    f_T = features(args.batch, y).to(device)
    labels = {name: part.to(device) for name, part in supervisions(args.K).items()}
    y = y.to(device)
    student = letkd.create_model(args.student, num_classes=C).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-7, momentum=0.9)
    images = torch.randn(args.batch, 3, 32, 32, device=device)

    def ce() -> None:
        F.cross_entropy(student(images), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    cases: dict[str, Callable] = {"one CE step (the unit)": ce}
    for bf16 in (False, True) if native else (False,):
        for fused in (False, True):
            how = f"{'fused' if fused else 'plain'}, {'bf16' if bf16 else 'fp32'}"
            one = site(labels["penultimate"], f_T, y, fused=fused, layer=True, bf16=bf16)
            two = site(labels["intermediate"], f_T, y, fused=fused, layer=True, bf16=bf16)
            cases[f"letKD-1, {how}"] = one
            cases[f"letKD-2's second site, {how}"] = two
            cases[f"QUEST, {how}"] = site(labels["penultimate"], f_T, y, fused=fused, layer=False, bf16=bf16)
            cases[f"labels alone, {how}"] = lambda fused=fused: (
                labels["penultimate"].labels(f_T, y) if fused else labels["penultimate"].p_T(f_T, y)
            )
    times = interleaved(cases, args.rounds)
    memory = {name: peak_memory(run) for name, run in cases.items()}
    unit = times["one CE step (the unit)"]
    show(
        f"KD layer + labels + loss at 8x8x64, K={args.K}, batch {args.batch}, unit {args.student}; {device_title()}",
        ["parts", "ms", "units", "peak memory (MB)"],
        [[name, f"{1e3 * t:.0f}", f"{t / unit:.2f}", f"{memory[name] / 1e6:.0f}"] for name, t in times.items()],
    )
    compare_with_recorded(args, "layer", {name: t / unit for name, t in times.items()})


if __name__ == "__main__":
    main()
