"""A trained student in one file: the network's name, the changes that methods made to it, and the weights."""

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
from letkd.models.extras import set_image_size
from letkd.taps import find_module, graft, layout_of_graft, replace_module
from letkd.taps.layouts import WRITTEN, layout_of

FORMAT = "letkd-student-2"
STUDENT = "student.safetensors"  # in a run folder
HUB_WEIGHTS = "model.safetensors"  # in a folder in the layout of the Hugging Face Hub

# The layers that a method may add to a student: after a module, or a FrozenLinear instead of the classifier. A file names them by
# class, and no other class is built because a file names it. Each returns its constructor's arguments from `settings()`.
LAYERS: dict[str, Callable[..., nn.Module]] = {cls.__name__: cls for cls in (KDLayer, FoldedKDLayer, Projector, FrozenLinear)}

Shapes = dict[str, tuple[int, ...]]
SETTINGS = {int: Count, float: Number, bool: StrictBool, tuple[int, int] | None: tuple[Count, Count] | None}


def _change_of(name: str, layer: Callable[..., nn.Module]) -> type[BaseModel]:
    """The schema of a change in a header: the layer, its path, and its constructor's arguments with types and bounds."""
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
    """The header of a student file: facts, the changes that methods made to the network, and other arguments of `save_student`."""

    model_config = ConfigDict(extra="allow")

    format: Literal["letkd-student-2"]
    model: str = Field(default="", min_length=1, max_length=1000, validate_default=True)
    changes: list[Change]  # pyright: ignore[reportInvalidTypeForm]

    @field_validator("input")
    @classmethod
    def _weights_do_not_normalise(cls, value: Input) -> Input:
        if value != "normalised":
            raise ValueError("the file has no graph that could normalise")
        return value


def save_student(student: nn.Module, path: str | Path, *, model: str, num_classes: int, **facts: Any) -> None:
    """Write a student that `load_student` can open.

    Args:
        student: the network, with the layers that methods added.
        model: name of the plain network for `create_model`.
        facts: other entries of the header: the fields of `letkd.distiller.facts.Facts` (class names, mean, std, size), and any
            values that JSON can represent.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "student.safetensors"
        >>> student = create_model("resnet8_tiny", num_classes=2)
        >>> save_student(student, path, model="resnet8_tiny", num_classes=2, classes=["cat", "dog"])
        >>> read_header(path)["classes"]
        ['cat', 'dog']
    """
    header = {**facts, "format": FORMAT, "model": model, "num_classes": num_classes, "changes": _changes(student)}
    try:
        Header.model_validate(header)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} was not written: invalid value at {wrong_places(error)}; see letkd.distiller.facts.Facts"
        ) from None
    save_weights(student, path, {"letkd": json.dumps(header)})


def load_student(path: str | Path, *, model: str | None = None, num_classes: int | None = None) -> nn.Module:
    """Load a student: build the network, apply the changes of the methods, load the weights, and set it to eval mode.

    Args:
        path: a file written by `save_student`, or a folder that contains one: a finished run, or the output of
            `letkd export --to hub-folder`.
        model: name of the network for `create_model`, if it is not in the zoo. The file contains the name, too, but code is not run
            only because a file names it.
        num_classes: a different number of classes; the classifier is then initialised randomly, and a message names it.

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
            f"{path} contains the network {name!r}, which is not in the zoo, and code is not run only because a file names it; if you "
            f"trust it, pass `model={name!r}`"
        )
    if num_classes not in (None, C) and any(change["layer"] == FrozenLinear.__name__ for change in header["changes"]):
        raise CheckpointError(
            f"{path} predicts its {C} classes with a teacher's classifier, which cannot be replaced by one for {num_classes} classes; "
            "start from other weights"
        )
    shapes = _shapes(path)
    if name in list_models():
        with torch.device("meta"):  # no memory is allocated until the sizes in the header match the tensors
            try:
                _must_fit(_change(create_model(name, num_classes=C), header, shapes, path), shapes, path)
            except CheckpointError as error:
                if name == header["model"]:
                    raise
                raise CheckpointError(
                    f"{path} contains {header['model']!r}, not {name!r}; name another file, or this network"
                ) from error
    student = create_model(name, num_classes=num_classes or C)
    if header.get("size"):
        set_image_size(student, header["size"])
    student = _change(student, header, shapes, path)
    load_weights(student, path, num_classes=num_classes)
    return student.eval()


def _file_in(path: Path) -> Path:
    """The student file in a folder; a file itself."""
    if not path.is_dir():
        return path
    names = (STUDENT, HUB_WEIGHTS)
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{path} contains no student: neither {' nor '.join(names)} exists in it")
    return found


def is_student_file(path: str | Path) -> bool:
    """Whether `save_student` wrote the file; plain weights have no letkd header."""
    try:
        with safe_open(path, framework="pt") as file:
            return "letkd" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_header(path: str | Path) -> dict[str, Any]:
    """The header of a student file, checked: the fields of `Header` as they were written."""
    try:
        with safe_open(path, framework="pt") as file:
            header = table_from_json((file.metadata() or {}).get("letkd"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a student file: {error}") from None
    if header is None or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a student file of letkd; to evaluate plain weights use `letkd eval FILE --student MODEL`"
        )
    checked(Header, header, path)
    return header


def _changes(student: nn.Module) -> list[dict[str, Any]]:
    """The changes that methods made, outer modules before inner ones, so that they can be repeated in this order."""
    found = []
    for at, module in student.named_modules():
        if type(module) in LAYERS.values():
            layer: Any = module
            host, _, name = at.rpartition(".")
            layout = layout_of_graft(student.get_submodule(host), name)
            written = {} if layout is None else {"layout": str(layout)}
            found.append({"layer": type(layer).__name__, "at": at, "settings": layer.settings(), **written})
    return found


def _change(student: nn.Module, header: dict[str, Any], shapes: Shapes, path: str | Path) -> nn.Module:
    """Apply the changes in the header to a plain network."""
    own = dict(student.named_modules())
    for change in header["changes"]:
        cls, at = LAYERS[change["layer"]], change["at"]
        if type(own.get(at)) is cls:  # part of the plain network
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
                raise TapError(f"{at!r} is not an nn.Linear, and only an nn.Linear can be replaced")
        except (TapError, UnsupportedPair) as error:
            raise CheckpointError(f"{path} does not fit its network and layers: {error}") from None
    return student


def _must_fit(module: nn.Module, shapes: Shapes, path: str | Path, prefix: str = "") -> None:
    for name, tensor in module.state_dict(prefix=prefix).items():
        if shapes.get(name) != tuple(tensor.shape):
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(
                f"{path} does not fit its network and layers: {name!r} {has} but should be {list(tensor.shape)}; get the file again"
            )


def _shapes(path: str | Path) -> Shapes:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict
