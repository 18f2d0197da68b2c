"""A trained student as one file: the network's name, what methods changed in it and the weights; no teacher is needed to open it."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import torch
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, ValidationError, field_validator
from pydantic import create_model as make
from safetensors import SafetensorError, safe_open
from torch import nn

from letkd.distiller.facts import Count, Facts, Input, Number, checked, table_from_json, wrong_places
from letkd.errors import CheckpointError, TapError, UnsupportedPair
from letkd.layer import KDLayer
from letkd.layer.folded import FoldedKDLayer
from letkd.methods.simkd import FrozenLinear, Projector
from letkd.models import create_model, list_models, load_weights, save_weights
from letkd.taps import find_module, graft, layout_of_graft, replace_module
from letkd.taps.layouts import WRITTEN, layout_of

FORMAT = "letkd-student-2"
STUDENT = "student.safetensors"  # in a run folder
HUB_WEIGHTS = "model.safetensors"  # in a folder in the layout of the Hugging Face Hub

# What a method may put into a student: behind a module (or folded there), or a FrozenLinear in the place of the classifier. A file
# names them by class, and nothing else is ever built because a file says so. Each tells its constructor's arguments by `settings()`.
LAYERS: dict[str, Callable[..., nn.Module]] = {cls.__name__: cls for cls in (KDLayer, FoldedKDLayer, Projector, FrozenLinear)}

Shapes = dict[str, tuple[int, ...]]
SETTINGS = {int: Count, float: Number, bool: StrictBool, tuple[int, int] | None: tuple[Count, Count] | None}


def _change_of(name: str, layer: Callable[..., nn.Module]) -> type[BaseModel]:
    """A change in a header: this layer, where it is, and what its constructor takes, each of its type and in range."""
    takes = inspect.signature(layer).parameters.items()
    defaults = {key: ... if parameter.default is parameter.empty else parameter.default for key, parameter in takes}
    fields: Any = {key: (SETTINGS[parameter.annotation], defaults[key]) for key, parameter in takes}
    exact = ConfigDict(extra="forbid", allow_inf_nan=False)
    settings = make(f"{name}Settings", __config__=exact, **fields)
    path = Annotated[str, Field(max_length=1000, pattern=r"^[^.]+(\.[^.]+)*$")]
    layout = Annotated[str | None, Field(max_length=100, pattern=WRITTEN)]
    fields = {"layer": (Literal[name], ...), "at": (path, ...), "settings": (settings, ...), "layout": (layout, None)}
    return make(name, __config__=exact, **fields)


Change = Annotated[Union[tuple(_change_of(*named) for named in LAYERS.items())], Discriminator("layer")]  # noqa: UP007


class Header(Facts):
    """The header of a student file: facts, what methods changed in the network, and whatever else `save_student` was given."""

    model_config = ConfigDict(extra="allow")

    format: Literal["letkd-student-2"]
    model: str = Field(default="", min_length=1, max_length=1000, validate_default=True)
    changes: list[Change]  # pyright: ignore[reportInvalidTypeForm]

    @field_validator("input")
    @classmethod
    def _weights_do_not_normalise(cls, value: Input) -> Input:
        if value != "normalised":
            raise ValueError("there is no graph that could normalise")
        return value


def save_student(student: nn.Module, path: str | Path, *, model: str, num_classes: int, **facts: Any) -> None:
    """Write a student that `load_student` can open.

    Args:
        model: the name that `create_model` knows the bare network by.
        facts: what else should travel in the header: the fields of `letkd.distiller.facts.Facts` (class names, mean, std, size), and
            anything that JSON can hold.
    """
    header = {**facts, "format": FORMAT, "model": model, "num_classes": num_classes, "changes": _changes(student)}
    try:
        Header.model_validate(header)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} was not written: no student can have what is given as {wrong_places(error)}; see letkd.distiller.facts.Facts"
        ) from None
    save_weights(student, path, {"letkd": json.dumps(header)})


def load_student(path: str | Path, *, model: str | None = None, num_classes: int | None = None) -> nn.Module:
    """Open what `save_student` wrote: build the network, change it as the methods did, load the weights; in eval mode.

    Args:
        path: the file, or a folder with it: a finished run, or what `letkd export --to hub-folder` wrote.
        model: the network by the name that `create_model` knows it by, where it is none of the zoo: the file says its name, too,
            but code is not run because a file says so.
        num_classes: for another number of classes than the file's; the classifier is then freshly initialised, and a line names it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "student.safetensors"
        >>> save_student(create_model("resnet8_tiny", num_classes=3), path, model="resnet8_tiny", num_classes=3)
        >>> load_student(path)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 3])
    """
    path = _file_in(Path(path))
    header = read_header(path)
    name, C = model or header["model"], header["num_classes"]
    if model is None and name not in list_models():
        raise CheckpointError(
            f"{path} holds the network {name!r}, which is none of the zoo, and code is not run because a file names it; where you "
            f"trust it, say so with `model={name!r}`"
        )
    if num_classes not in (None, C) and any(change["layer"] == FrozenLinear.__name__ for change in header["changes"]):
        raise CheckpointError(
            f"{path} predicts its {C} classes by a teacher's classifier, which cannot be replaced by one for {num_classes}; start from "
            "other weights"
        )
    shapes = _shapes(path)
    if name in list_models():
        with torch.device("meta"):  # no memory is taken before the sizes in the header are known to be those of the tensors
            _must_fit(_change(create_model(name, num_classes=C), header, shapes, path), shapes, path)
    student = _change(create_model(name, num_classes=num_classes or C), header, shapes, path)
    load_weights(student, path, num_classes=num_classes)
    return student.eval()


def _file_in(path: Path) -> Path:
    """The student file in a folder; a file as it is."""
    if not path.is_dir():
        return path
    names = (STUDENT, HUB_WEIGHTS)
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{path} holds no student: there is no {' and no '.join(names)} in it")
    return found


def is_student_file(path: str | Path) -> bool:
    """Whether `save_student` wrote a file; plain weights have no header of ours."""
    try:
        with safe_open(path, framework="pt") as file:
            return "letkd" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_header(path: str | Path) -> dict[str, Any]:
    """What a student file says of itself, checked: the fields of `Header` as they were written."""
    try:
        with safe_open(path, framework="pt") as file:
            header = table_from_json((file.metadata() or {}).get("letkd"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no student file: {error}") from None
    if header is None or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is no student file of letkd; plain weights are evaluated by `letkd eval FILE --student MODEL`"
        )
    checked(Header, header, path)
    return header


def _changes(student: nn.Module) -> list[dict[str, Any]]:
    """What methods changed, hosts before what stands inside them, so that it can be done again in this order."""
    found = []
    for at, module in student.named_modules():
        if type(module) in LAYERS.values():
            layer: Any = module
            host, _, name = at.rpartition(".")
            layout = layout_of_graft(student.get_submodule(host), name)
            told = {} if layout is None else {"layout": str(layout)}
            found.append({"layer": type(layer).__name__, "at": at, "settings": layer.settings(), **told})
    return found


def _change(student: nn.Module, header: dict[str, Any], shapes: Shapes, path: str | Path) -> nn.Module:
    """Do to a bare network what the header says."""
    own = dict(student.named_modules())
    for change in header["changes"]:
        cls, at = LAYERS[change["layer"]], change["at"]
        if type(own.get(at)) is cls:  # the network came with it
            continue
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in change["settings"].items()}
        host, _, name = at.rpartition(".")
        try:
            with torch.device("meta"):
                _must_fit(cls(**settings), shapes, path, f"{at}.")
            if cls is not FrozenLinear:
                layout = layout_of(change["layout"]) if change.get("layout") else None
                graft(student, cls(**settings), after=host, name=name, layout=layout)
            elif type(find_module(student, at)) is nn.Linear:
                replace_module(student, at, cls(**settings))
            else:
                raise TapError(f"{at!r} is no nn.Linear, and only that is replaced")
        except (TapError, UnsupportedPair) as error:
            raise CheckpointError(f"{path} does not fit its network and layers: {error}") from None
    return student


def _must_fit(module: nn.Module, shapes: Shapes, path: str | Path, prefix: str = "") -> None:
    for name, tensor in module.state_dict(prefix=prefix).items():
        if shapes.get(name) != tuple(tensor.shape):
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(
                f"{path} does not fit its network and layers: {name!r} {has} and should be {list(tensor.shape)}; get it again"
            )


def _shapes(path: str | Path) -> Shapes:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
