"""Student and teacher in one step, what a cache keeps of the teacher, and the student's file."""

from letkd.distiller.distiller import Distiller
from letkd.distiller.step import Step

__all__ = ["Distiller", "Step"]
