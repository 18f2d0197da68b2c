"""What is fitted to a teacher offline: three supervisions, which compute per-pixel labels, the class trees of TDD and the banks of CRD."""

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
