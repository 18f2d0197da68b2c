"""The distiller (student and teacher in one step), the cache of the teacher's outputs, and the student's file."""

from letkd.distiller.distiller import Distiller
from letkd.distiller.step import Step

__all__ = ["Distiller", "Step"]
