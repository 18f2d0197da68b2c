"""Three ways to get per-pixel labels from a teacher."""

from letkd.supervision.base import Supervision
from letkd.supervision.conv3x3 import ConvSupervision
from letkd.supervision.kmeans import KMeansSupervision
from letkd.supervision.subclass import SubclassSupervision

SUPERVISIONS: dict[str, type[Supervision]] = {
    cls.kind: cls for cls in (KMeansSupervision, ConvSupervision, SubclassSupervision)
}

__all__ = ["SUPERVISIONS", "ConvSupervision", "KMeansSupervision", "SubclassSupervision", "Supervision"]
