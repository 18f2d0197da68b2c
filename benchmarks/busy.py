"""A training step on a quiet machine and next to a spinning process, by number of OpenMP threads and how they wait.

    python benchmarks/busy.py [--rounds 5] [--steps 30] [--spinners 1] [--check | --record]

Every round starts one process per setting, on the quiet machine and next to spinning processes, in random order. The table
shows the median wall-clock time per step. Ratios are relative to OpenMP's default (threads spin) on the quiet machine, for the
same network.
"""

import os
import random
import statistics
import subprocess
import sys

import torch

from timing import begin, compare_with_recorded, parser, show

STEPS = """
import sys, time, torch, letkd
import torch.nn.functional as F
model, batch, size, steps = letkd.create_model(sys.argv[1], num_classes=10), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
x, y = torch.randn(batch, 3, size, size), torch.arange(batch) % 10
def step():
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(5):
    step()
start = time.perf_counter()
for _ in range(steps):
    step()
print((time.perf_counter() - start) / steps)
"""
SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:  # ends when the benchmark ends, for any reason
    for _ in range(1_000_000):
        pass
"""
NETWORKS = {"resnet8_tiny, 8x8": ("resnet8_tiny", "64", "8"), "resnet20, 32x32": ("resnet20", "64", "32")}
THREADS = str(torch.get_num_threads())
WAYS = {
    f"default, {THREADS} threads": {"OMP_NUM_THREADS": THREADS},
    f"short spin, {THREADS} threads": {"GOMP_SPINCOUNT": "3000", "OMP_NUM_THREADS": THREADS},
    f"passive, {THREADS} threads": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": THREADS},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def seconds(network: str, way: str, steps: int) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | WAYS[way]
    command = [sys.executable, "-c", STEPS, *NETWORKS[network], str(steps)]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--spinners", type=int, default=1, help="processes that spin on the busy machine")
    args = begin(arguments)
    cases = [(network, way, busy) for network in NETWORKS for way in WAYS for busy in (False, True)]
    times: dict[tuple[str, str, bool], list[float]] = {case: [] for case in cases}
    for k in range(args.rounds):
        for case in random.Random(k).sample(cases, len(cases)):
            network, way, busy = case
            spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(args.spinners * busy)]
            try:
                times[case].append(seconds(network, way, args.steps))
            finally:
                for process in spinning:
                    process.kill()
                    process.wait()
    taken = {case: statistics.median(values) for case, values in times.items()}
    ratios, rows = {}, []
    for network in NETWORKS:
        unit = taken[network, f"default, {THREADS} threads", False]
        for way in WAYS:
            quiet, busy = taken[network, way, False], taken[network, way, True]
            ratios |= {f"{network}, {way}": quiet / unit, f"{network}, {way}, busy": busy / unit}
            rows.append([network, way, f"{1e3 * quiet:.1f}", f"{quiet / unit:.2f}", f"{1e3 * busy:.1f}", f"{busy / unit:.2f}"])
    columns = ["network", "threads", "quiet, ms", "ratio", "busy, ms", "ratio"]
    show(f"a step of cross-entropy, batch 64, {os.cpu_count()} cores, {args.spinners} spinning", columns, rows)
    compare_with_recorded(args, "busy", ratios)


if __name__ == "__main__":
    main()
