"""What is fitted to a teacher offline: three supervisions that give per-pixel labels, and the class tree of TDD and memory of CRD."""

from letkd.supervision.base import Supervision
from letkd.supervision.conv3x3 import ConvSupervision
from letkd.supervision.fitted import Fitted
from letkd.supervision.kmeans import KMeansSupervision
from letkd.supervision.registry import SUPERVISIONS, register_supervision
from letkd.supervision.subclass import SubclassSupervision

for _supervision in (KMeansSupervision, ConvSupervision, SubclassSupervision):
    register_supervision(_supervision)

__all__ = [
    "SUPERVISIONS",
    "ConvSupervision",
    "Fitted",
    "KMeansSupervision",
    "SubclassSupervision",
    "Supervision",
    "register_supervision",
]
