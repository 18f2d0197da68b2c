"""Start-up time: `letkd --help`, and `letkd train` on digits to the end of its first step.

    python benchmarks/startup.py [--rounds 3] [--check | --record]

Times whole processes: wall-clock time, and processor time, which other work on the machine disturbs less.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import begin, compare_with_recorded, parser, show

FIRST_STEP = """
import sys, time
from letkd.training import loop
from letkd.recipes import resolve
from letkd.distiller import Distiller
forward = Distiller.forward
def first(self, batch):
    step = forward(self, batch)
    print('first step', flush=True)
    raise SystemExit
Distiller.forward = first
loop.train(resolve('digits/tiny/ce'), sys.argv[1])
"""


def processor_time() -> float:
    """Processor time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    args = begin(parser(__doc__, rounds=3))
    cases = {
        "python -c pass": ([sys.executable, "-c", "pass"], None),
        "import torch": ([sys.executable, "-c", "import torch"], None),
        "letkd --help": ([sys.executable, "-m", "letkd", "--help"], 0.5),
        "letkd train digits, first step": ([sys.executable, "-c", FIRST_STEP], 10.0),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    busy: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(args.rounds + 1):
        for name, (command, _) in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                start, before = time.perf_counter(), processor_time()
                subprocess.run([*command, str(Path(folder) / "run")], check=True, capture_output=True)
            if k:  # the first round fills the file cache
                times[name].append(time.perf_counter() - start)
                busy[name].append(processor_time() - before)
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    show(
        "start-up",
        ["command", "s by the clock", "s of CPU", "target (s)"],
        [
            [name, f"{t:.2f}", f"{statistics.median(busy[name]):.2f}", "" if cases[name][1] is None else f"{cases[name][1]:g}"]
            for name, t in middle.items()
        ],
    )
    compare_with_recorded(
        args, "startup", {name: t / middle["import torch"] for name, t in middle.items() if name.startswith("letkd")}
    )


if __name__ == "__main__":
    main()
