"""Cost of a KD layer at inference: the student with layers of K templates, relative to the student without layers.

    python benchmarks/inference.py [--student resnet20] [--batches 1,128] [--rounds 7] [--check | --record]

The paper reports 2 % for the intermediate layer and 2 to 20 % for the penultimate one, with K from 64 to 4096. All rows have a
layer at the penultimate map, except the one with a layer of 800 templates (8 per class, 100 classes) at the intermediate map.
"""

import torch

import letkd
from timing import begin, compare_with_recorded, device_title, interleaved, parser, show

C = 100
LAYERS = [("penultimate", K) for K in (64, 256, 1024, 4096)] + [("intermediate", 800)]


def student(name: str, role: str | None = None, K: int = 0) -> torch.nn.Module:
    torch.manual_seed(0)
    model = letkd.create_model(name, num_classes=C)
    if role is not None:
        tap = model.taps[role]
        letkd.graft(model, letkd.KDLayer(tap.channels, K), after=tap.path)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--student", default="resnet20")
    arguments.add_argument("--batches", default="1,128")
    args = begin(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {"bare student": student(args.student)}
    models |= {f"{role}, K={K}": student(args.student, role, K) for role, K in LAYERS}
    rows, ratios = {name: [name] for name in models}, {}
    for b in map(int, args.batches.split(",")):
        x, repeats = torch.randn(b, 3, 32, 32, device=device), max(1, 64 // b)

        @torch.inference_mode()
        def run(model: torch.nn.Module, x: torch.Tensor = x, repeats: int = repeats) -> None:
            for _ in range(repeats):
                model(x)

        times = interleaved({name: lambda model=model: run(model) for name, model in models.items()}, args.rounds)
        bare = times["bare student"]
        for name, t in times.items():
            rows[name] += [f"{1e3 * t / repeats:.1f}", f"{t / bare:.2f}"]
            ratios[f"batch {b}, {name}"] = t / bare
    heads = [head for b in args.batches.split(",") for head in (f"batch {b} (ms)", "/ bare")]
    show(f"{args.student} at inference; {device_title()}", ["network", *heads], list(rows.values()))
    compare_with_recorded(args, "inference", ratios)


if __name__ == "__main__":
    main()
