"""Launchers: run tasks in other processes, on this machine or on many."""

from letkd.training.launchers.local import Local
from letkd.training.launchers.tasks import FitTask, Launcher, Outcome, Task, TrainTask, attempt

__all__ = ["FitTask", "Launcher", "Local", "Outcome", "Task", "TrainTask", "attempt"]
