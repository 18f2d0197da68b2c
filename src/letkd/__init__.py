"""letKD: a layer that puts the teacher's knowledge *inside* the student."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from letkd import methods
    from letkd.batch import Batch
    from letkd.distiller import Distiller, Step
    from letkd.distiller.cache import TeacherCache
    from letkd.distiller.student import load_student, save_student
    from letkd.distiller.teacher_input import TeacherInput
    from letkd.errors import LetkdError
    from letkd.layer import CosineConv1x1, KDLayer, soft_match
    from letkd.models import create_model, list_models, load_weights
    from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision
    from letkd.taps import Tap, graft
    from letkd.taps.find import find_taps

# Names are imported when first used, so that the command line can answer without torch.
_HOME = {
    "methods": "letkd.methods",
    "Batch": "letkd.batch",
    "TeacherCache": "letkd.distiller.cache",
    "Distiller": "letkd.distiller",
    "Step": "letkd.distiller",
    "LetkdError": "letkd.errors",
    "CosineConv1x1": "letkd.layer",
    "KDLayer": "letkd.layer",
    "soft_match": "letkd.layer",
    "create_model": "letkd.models",
    "list_models": "letkd.models",
    "load_weights": "letkd.models",
    "load_student": "letkd.distiller.student",
    "save_student": "letkd.distiller.student",
    "ConvSupervision": "letkd.supervision",
    "KMeansSupervision": "letkd.supervision",
    "SubclassSupervision": "letkd.supervision",
    "Tap": "letkd.taps",
    "find_taps": "letkd.taps.find",
    "graft": "letkd.taps",
    "TeacherInput": "letkd.distiller.teacher_input",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'letkd' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if name == "methods" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
