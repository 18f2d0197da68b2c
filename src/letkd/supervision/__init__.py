"""What is fitted to a teacher offline: three supervisions that give per-pixel labels, and the class tree of TDD and memory of CRD."""

from letkd.supervision.base import Supervision
from letkd.supervision.conv3x3 import ConvSupervision
from letkd.supervision.kmeans import KMeansSupervision
from letkd.supervision.subclass import SubclassSupervision

SUPERVISIONS: dict[str, type[Supervision]] = {
    cls.kind: cls for cls in (KMeansSupervision, ConvSupervision, SubclassSupervision)
}

__all__ = ["SUPERVISIONS", "ConvSupervision", "KMeansSupervision", "SubclassSupervision", "Supervision"]
