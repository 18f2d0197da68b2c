"""Launchers: run tasks in other processes, on this machine or on many."""

from letkd.train.launch.local import Local
from letkd.train.launch.tasks import FitTask, Launcher, Outcome, Task, TrainTask, attempt

__all__ = ["FitTask", "Launcher", "Local", "Outcome", "Task", "TrainTask", "attempt"]
