"""Launchers: run tasks in other processes, on this machine or on many."""

from letkd.train.launchers.local import Local
from letkd.train.launchers.tasks import FitTask, Launcher, Outcome, Task, TrainTask, attempt

__all__ = ["FitTask", "Launcher", "Local", "Outcome", "Task", "TrainTask", "attempt"]
