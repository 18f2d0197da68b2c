"""letKD: a layer that puts the teacher's knowledge *inside* the student."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from letkd import methods
    from letkd.batch import Batch
    from letkd.data import Dataset, Loader, load_data, register_data
    from letkd.distiller import Distiller, Step
    from letkd.distiller.cache import TeacherCache
    from letkd.distiller.student import load_student, save_student
    from letkd.distiller.teacher_input import TeacherInput
    from letkd.errors import (
        CheckpointError,
        DataError,
        ExportError,
        FitError,
        LetkdError,
        NonFiniteError,
        NotFittedError,
        RecipeError,
        RunError,
        TapError,
        UnsupportedPair,
    )
    from letkd.layer import CosineConv1x1, KDLayer, soft_match
    from letkd.methods import Method, Site, register_method
    from letkd.methods.base import View
    from letkd.models import create_model, list_models, load_weights, register_model, save_weights
    from letkd.recipes import Recipe, resolve
    from letkd.runs.evaluation import evaluate
    from letkd.supervision import (
        ConvSupervision,
        Fitted,
        KMeansSupervision,
        SubclassSupervision,
        Supervision,
        register_supervision,
    )
    from letkd.taps import Tap, find_taps, graft
    from letkd.training.loop import train

# Names are imported when first used, so that the command line can answer without torch.
_HOME = {
    "methods": "letkd.methods",
    "Batch": "letkd.batch",
    "TeacherCache": "letkd.distiller.cache",
    "Distiller": "letkd.distiller",
    "Step": "letkd.distiller",
    "TeacherInput": "letkd.distiller.teacher_input",
    "load_student": "letkd.distiller.student",
    "save_student": "letkd.distiller.student",
    "LetkdError": "letkd.errors",
    "TapError": "letkd.errors",
    "UnsupportedPair": "letkd.errors",
    "NotFittedError": "letkd.errors",
    "FitError": "letkd.errors",
    "NonFiniteError": "letkd.errors",
    "DataError": "letkd.errors",
    "RecipeError": "letkd.errors",
    "CheckpointError": "letkd.errors",
    "RunError": "letkd.errors",
    "ExportError": "letkd.errors",
    "CosineConv1x1": "letkd.layer",
    "KDLayer": "letkd.layer",
    "soft_match": "letkd.layer",
    "Method": "letkd.methods",
    "Site": "letkd.methods",
    "View": "letkd.methods.base",
    "register_method": "letkd.methods",
    "create_model": "letkd.models",
    "list_models": "letkd.models",
    "load_weights": "letkd.models",
    "save_weights": "letkd.models",
    "register_model": "letkd.models",
    "Dataset": "letkd.data",
    "Loader": "letkd.data",
    "load_data": "letkd.data",
    "register_data": "letkd.data",
    "Recipe": "letkd.recipes",
    "resolve": "letkd.recipes",
    "evaluate": "letkd.runs.evaluation",
    "train": "letkd.training.loop",
    "ConvSupervision": "letkd.supervision",
    "Fitted": "letkd.supervision",
    "KMeansSupervision": "letkd.supervision",
    "SubclassSupervision": "letkd.supervision",
    "Supervision": "letkd.supervision",
    "register_supervision": "letkd.supervision",
    "Tap": "letkd.taps",
    "find_taps": "letkd.taps",
    "graft": "letkd.taps",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'letkd' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if name == "methods" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
