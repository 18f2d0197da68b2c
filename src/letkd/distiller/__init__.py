"""Student and teacher in one step, what a cache keeps of the teacher, and the student's file."""

from letkd.distiller.distiller import Distiller, Step

__all__ = ["Distiller", "Step"]
