"""Tasks as SLURM jobs, with submitit (`pip install letkd[slurm]`)."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from letkd.errors import LetkdError, Stopped
from letkd.optional import need
from letkd.progress import set_quiet
from letkd.training.launchers.tasks import Outcome, Task, Waiting, attempt, log_outcome
from letkd.training.stop import STOPPED, immediate_stop, polite_stop

POLL = 0.5  # seconds; submitit queries SLURM less often
PATIENCE = 60.0  # seconds for stopped jobs to write their checkpoints
REQUEUES = 1000  # per job, at its time limit; the run resumes each time


class Slurm:
    """Runs each task as a job. At its time limit a job writes its checkpoint and is requeued; results are collected as they arrive.

    Args:
        folder: for submitit's files and the output of the jobs; on shared storage.
        jobs: largest number of submitted jobs; 0 for no limit.
        minutes: time limit per job.
        cluster: `local` runs the jobs on this machine, for tests without SLURM.
        gpus, cpus, mem: per job; memory in GB.
        partition, account, qos: as for `sbatch`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        jobs: int = 0,
        minutes: int = 1440,
        cluster: Literal["slurm", "local"] = "slurm",
        gpus: int | None = None,
        cpus: int | None = None,
        mem: int | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
    ):
        self._submitit = need("submitit", "slurm", "--launcher slurm")
        if cluster == "slurm" and shutil.which("srun") is None:
            raise LetkdError(
                "--launcher slurm: SLURM is not installed here (no srun found); run this on a login node of the cluster, or test it "
                "with --launcher slurm:cluster=local"
            )
        self.folder, self.jobs, self.cluster = folder, jobs, cluster
        self._settings = {
            "timeout_min": minutes,
            "gpus_per_node": gpus,
            "cpus_per_task": cpus,
            "mem_gb": mem,
            "slurm_partition": partition,
            "slurm_account": account,
            "slurm_qos": qos,
        }

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Outcome]]:
        limits = {"slurm_max_num_timeout": REQUEUES, "local_max_num_timeout": REQUEUES}
        executor = self._submitit.AutoExecutor(self.folder, cluster=self.cluster, **limits)
        executor.update_parameters(name="letkd", **self._settings)
        waiting = Waiting(tasks)
        running: dict[int, Any] = {}
        with polite_stop() as request:
            try:
                while waiting or running:
                    while waiting and not (self.jobs and len(running) >= self.jobs):
                        k = waiting.pop()
                        running[k] = executor.submit(_Job(tasks[k], os.getcwd()))
                    if request.asked:
                        raise Stopped(STOPPED)
                    for k in [k for k, job in running.items() if job.done()]:
                        if not waiting.retry(k, outcome := _outcome(running.pop(k))):
                            log_outcome(tasks[k], outcome, len(running) + len(waiting))
                            yield k, outcome
                    time.sleep(POLL)
            finally:
                self._end(list(running.values()))

    def _end(self, jobs: list[Any]) -> None:
        """Ask jobs to stop, and wait until they have written their checkpoints."""
        for job in jobs:
            if self.cluster == "local":
                os.kill(int(job.job_id), signal.SIGTERM)  # passed on to the run; cancel() would leave it only a second
            else:
                job.cancel()
        until = time.monotonic() + PATIENCE
        while jobs and time.monotonic() < until:
            jobs = [job for job in jobs if not job.done()]
            time.sleep(POLL)


def _outcome(job: Any) -> Outcome:
    try:
        return job.result()
    except Exception as error:  # errors of submitit, or of reading an incomplete result
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome("killed", f"job {job.job_id} returned no result ({lines[0]:.200})")


class _Job:
    """A task inside a SLURM job. Before the time limit SLURM sends a signal, and submitit would requeue at once. Instead, the run
    first writes its checkpoint, as after SIGTERM; then submitit's handler is called."""

    def __init__(self, task: Task, folder: str):
        self.task, self.folder = task, folder

    def __call__(self) -> Outcome:
        os.chdir(self.folder)
        set_quiet(False)  # messages go to the log of the job
        number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
        requeue: Callable[[int, None], object] = signal.getsignal(number)  # pyright: ignore[reportAssignmentType]
        signalled = False

        def stop(*_: object) -> None:
            nonlocal signalled
            signalled = True
            signal.raise_signal(signal.SIGTERM)

        signal.signal(number, stop)
        with immediate_stop():
            outcome = attempt(self.task)
        signal.signal(number, requeue)  # pyright: ignore[reportArgumentType]
        if signalled and outcome.state == "stopped" and callable(requeue):
            requeue(number, None)  # ends this process
        return outcome

    def checkpoint(self) -> Any:
        """What submitit runs when the job restarts: the same task, which resumes."""
        return need("submitit", "slurm", "--launcher slurm").helpers.DelayedSubmission(self)
