"""The model zoo's registry, and `create_model`, which builds a network from its zoo name or from a user's callable."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from letkd.errors import LetkdError, nearest
from letkd.models.extras import EXTRAS, create_extra, reason
from letkd.models.own_folders import PREFIX, importable
from letkd.models.pretrained import OWN, load_pretrained, pretrained_folder
from letkd.models.weights import leave_out_head, load_weights
from letkd.plugins import Registry
from letkd.progress import say


def _check(name: str, build: Any) -> None:
    if getattr(build, "__name__", None) != name:
        raise LetkdError(
            f"its entry point is named {name!r} but the function {getattr(build, '__name__', build)!r}; give both the same name"
        )


MODELS: Registry[Callable[..., nn.Module]] = Registry("models", "a model", _check)

Build = TypeVar("Build", bound=Callable[..., nn.Module])


def register_model(build: Build) -> Build:
    """Add a function `build(num_classes=...)` to the zoo under its own name. Usable as a decorator.

    Examples:
        >>> @register_model
        ... def linear_probe(num_classes):
        ...     return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))
        >>> create_model("linear_probe", num_classes=10)[2].out_features
        10
        >>> _ = MODELS.remove("linear_probe")
    """
    MODELS.add(build.__name__, build)
    return build


def list_models() -> list[str]:
    """The names of the zoo's networks, sorted.

    Examples:
        >>> [name for name in list_models() if name.startswith("vgg")]
        ['vgg11', 'vgg13', 'vgg16', 'vgg19', 'vgg8']
    """
    return sorted(MODELS)


def create_model(
    name: str, *, num_classes: int, weights: str | Path | None = None, new_head: bool = False, headless: bool = False
) -> nn.Module:
    """Build a network from the zoo, from another library or from your own code.

    Args:
        name: a zoo name; `timm:NAME`, `torchvision:NAME` or `transformers:NAME` (see `letkd.models.extras`); or
            `package.module:callable` or `path/to/file.py:callable` for a model of your own. The callable returns an
            `nn.Module`; its only argument is `num_classes`, if its signature accepts it.
        num_classes: number of logits.
        weights: a file to load, as `load_weights` reads it; or, for transformers, a folder written by `save_pretrained`; or `own` for
            a callable that loads its own weights, and for `transformers:FOLDER`. If omitted, the network is freshly initialised.
        new_head: accept weights with another number of classes; the classifier is then freshly initialised, and a message names it.
        headless: accept weights without a classifier, such as released backbones. The network then has no classifier either: it
            returns the features, and its `num_classes` is 0.

    Examples:
        >>> model = create_model("resnet20", num_classes=100)
        >>> sum(parameter.numel() for parameter in model.parameters())
        278324
    """
    if num_classes < 1:
        raise LetkdError(f"num_classes={num_classes}: a classifier needs at least 1 class")
    if weights is not None and (folder := pretrained_folder(name, weights)) is not None:
        return load_pretrained(folder, num_classes, new_head=new_head, headless=headless)
    if str(weights) == OWN and not is_code(name):
        raise LetkdError(
            f"weights=own was given for {name!r}, which does not load weights itself; name a file, or your own callable that loads them"
        )
    if name in MODELS:
        model = MODELS[name](num_classes=num_classes)
    elif name.partition(":")[0] in EXTRAS and ":" in name:
        library, _, rest = name.partition(":")
        model = create_extra(library, rest, num_classes)
    elif ":" in name:
        model = _create_own(name, num_classes)
    else:
        raise LetkdError(
            f"there is no model {name!r} in the zoo; nearest: {nearest(name, MODELS)}; "
            f"name a model of another library as {', '.join(f'{library}:NAME' for library in EXTRAS)}, "
            "your own as package.module:callable or path/to/file.py:callable"
        )
    if weights is not None and str(weights) != OWN:
        if headless and (left_out := leave_out_head(model, weights, num_classes)):
            say(f"{weights}: has no {', '.join(left_out)}, so {name} is a backbone without a classifier")
        load_weights(model, weights, num_classes=num_classes if new_head else None)
    return model


def is_code(name: str) -> bool:
    """Whether `create_model` would run the user's own code for this name: a callable in a file or package."""
    return name not in MODELS and ":" in name and name.partition(":")[0] not in EXTRAS


def takes_num_classes(name: str) -> bool:
    """Whether the user's own callable of this name takes the number of classes; its code is imported."""
    with _own_callable(name) as build:
        return _takes_num_classes(build)


def _create_own(name: str, num_classes: int) -> nn.Module:
    with _own_callable(name) as build:
        return _build(name, build, num_classes)


@contextmanager
def _own_callable(name: str) -> Iterator[Callable]:
    """The user's own callable; within `with`, modules beside its file can be imported."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise LetkdError(f"{name!r} does not name a callable; write package.module:callable or path/to/file.py:callable")
    if not source.endswith(".py"):
        yield _callable_in(name, _import_package(source))
        return
    file = Path(source).expanduser()
    with importable(file.resolve().parent):
        yield _callable_in(name, _import_file(file))


def _callable_in(name: str, module: ModuleType) -> Callable:
    source, _, attribute = name.rpartition(":")
    try:
        build = getattr(module, attribute)
    except AttributeError:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise LetkdError(f"{source} has no {attribute!r}; nearest: {nearest(attribute, names)}") from None
    if isinstance(build, nn.Module):
        raise LetkdError(f"{name!r} is a model, and a function or class that builds a new model is needed; name one")
    if not callable(build):
        raise LetkdError(
            f"{name!r} is a {type(build).__name__} and cannot be called; name a function or class that builds a model"
        )
    return build


def _build(name: str, build: Callable, num_classes: int) -> nn.Module:
    arguments = {"num_classes": num_classes} if _takes_num_classes(build) else {}
    try:
        model = build(**arguments)
    except (Exception, SystemExit) as error:
        called = f"num_classes={num_classes}" if arguments else "no arguments"
        raise LetkdError(f"{name!r}, called with {called}, failed with {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise LetkdError(f"{name!r} returned a {type(model).__name__}; it must return an nn.Module")
    return model


def _takes_num_classes(build: Callable) -> bool:
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    named = parameters.get("num_classes")
    if named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY):
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _import_package(source: str) -> ModuleType:
    # The command that pip installs does not search the current folder, which often contains the user's model.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{source}.".startswith(f"{error.name}."):
            raise LetkdError(
                f"there is no module {source!r}; install it, put its folder on PYTHONPATH, "
                "or name a file as path/to/file.py:callable"
            ) from None
        raise LetkdError(f"importing {source} failed with {reason(error)}") from error
    except (Exception, SystemExit) as error:
        raise LetkdError(f"importing {source} failed with {reason(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LetkdError(f"there is no file {path}; name your own model as path/to/file.py:callable")
    source = path.read_bytes()
    # One module name per path and content: importing a file twice gives the same classes (so they pickle and compare), an
    # edited file is imported again, and files of the same name, or named like a package, do not collide.
    digest = hashlib.sha256(bytes(path.resolve()) + b"\0" + source).hexdigest()
    unique = f"{PREFIX}model_{digest[:16]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path.resolve())
    if spec is None:
        raise LetkdError(f"{path} cannot be imported; name your own model as path/to/file.py:callable")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        # Compiled here and not by the spec's loader, whose cached bytecode can be older than the source.
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[unique]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise LetkdError(f"importing {path} failed with {reason(error)}") from error
    return module
