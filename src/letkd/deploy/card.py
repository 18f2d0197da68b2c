"""The model card of a folder for the Hugging Face Hub: its metadata and its text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from letkd.deploy.source import AVERAGED, LAST, Measured
from letkd.distiller.student import HUB_WEIGHTS
from letkd.errors import ExportError
from letkd.models.base import is_code
from letkd.models.pretrained import PREFIX
from letkd.recipes.schema import Recipe
from letkd.runs.results import mean_std

CONFIG = "config.json"
# Names of the data sets on the Hub.
DATASETS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "imagenet": "ILSVRC/imagenet-1k",
    "tiny-imagenet": "zh-plus/tiny-imagenet",
}
# Networks of the zoo with the same parameter names as in torchvision.
IN_TORCHVISION = ("resnet18", "resnet34", "resnet50")


@dataclass(frozen=True)
class Origin:
    """Origin of a student.

    Args:
        recipe: of its run; None if unknown.
        measured: its test accuracy; None if it was not measured.
        seeds: test accuracies in per cent over the seeds of its recipe, for the same weights as `measured`.
        labelled: whether it was trained with labels.
    """

    recipe: Recipe | None = None
    measured: Measured | None = None
    seeds: tuple[float, ...] = ()
    labelled: bool = True


def metadata(hub: Any, title: str, origin: Origin, licence: str | None) -> Any:
    """The YAML block of the card, built by huggingface_hub."""
    given: dict[str, Any] = {
        "library_name": "letkd",
        "license": licence or "unknown",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "knowledge-distillation", "letkd", "pytorch"],
    }
    if origin.recipe is not None and origin.recipe.data.name in DATASETS:
        given["datasets"] = [DATASETS[origin.recipe.data.name]]
    if (measured := origin.measured) is not None:
        given["metrics"] = ["accuracy"]
        given["model_name"] = title
        given["eval_results"] = [
            hub.EvalResult(
                task_type="image-classification",
                dataset_type=DATASETS.get(measured.data, measured.data),
                dataset_name=measured.data,
                dataset_split="test",
                metric_type="accuracy",
                metric_name=f"top-1 accuracy of this checkpoint, {measured.weights}",
                metric_value=round(measured.top1 / 100, 6),
            )
        ]
    try:
        return hub.ModelCardData(**given)
    except ValueError as error:
        raise ExportError(f"huggingface_hub rejects the model card: {str(error).splitlines()[0]}") from None


def body(title: str, origin: Origin, config: dict[str, Any], licence: str | None, *, takes_num_classes: bool = True) -> str:
    """The text of the card.

    Args:
        config: the content of config.json.
        takes_num_classes: whether a callable of the user's own takes the number of classes.
    """
    table = "".join(f"| {key} | {value} |\n" for key, value in _rows(origin, config, licence))
    return f"""# {title}

An image classifier, trained {"by knowledge distillation " if config["teacher"] else ""}with letkd.

| | |
|---|---|
{table}
## How to load it

{_needs(config["model"])}Run in this folder:

```python
import json
import letkd
import torch

config = json.load(open("{CONFIG}"))
student = letkd.load_student("."{_trusted(config["model"])})
{_feed(config)}{_SHOW}```

{_plain_loader(config, takes_num_classes)}
## Limits

{_accuracy_limit(origin.measured)} Do not use the model to decide about
people, for safety, or as the only source of a medical or legal finding. {_class_limit(origin, config)}
Errors and biases of {"the teacher and of " if config["teacher"] else ""}the training data may have
been passed on.

## Training

letkd {config["letkd_version"]}.{_measurement(origin.measured)}
"""


def _rows(origin: Origin, config: dict[str, Any], licence: str | None) -> list[tuple[str, str]]:
    recipe, measured = origin.recipe, origin.measured
    rows = [("Network", f"`{_portable(config['model'])}`"), ("Classes", f"{config['num_classes']:,}")]
    if config["size"]:
        how = f"normalised by the mean and std in `{CONFIG}`" if _is_normalised(config) else "with an unknown normalisation"
        rows.append(("Input", f"RGB, {config['size'][0]}x{config['size'][1]}, {how}"))
    if recipe is not None:
        rows += [
            ("Data set", recipe.data.name),
            ("Teacher", f"`{config['teacher']}`" if config["teacher"] else "none"),
            ("Method", recipe.title or "own recipe"),
            ("Epochs", str(recipe.train.epochs)),
            ("Seed", str(recipe.train.seed)),
        ]
    if measured is not None:
        rows.append(("Test accuracy of this checkpoint", f"{measured.top1:.2f} % on {measured.data}, {measured.weights}"))
    if origin.seeds:
        n = len(origin.seeds)
        seeds = f"{mean_std(list(origin.seeds))} %, n = {n}" if n > 1 else "unknown: only one seed was trained"
        rows.append(("Test accuracy over seeds", seeds))
    own = licence or "unknown: choose one before you publish, and check the licences of the data and the teacher"
    return [*rows, ("Licence", own)]


def _accuracy_limit(measured: Measured | None) -> str:
    if measured is None:
        return "The accuracy of this model was not measured."
    return f"The accuracy above was measured on the test split of {measured.data} and says nothing about other images."


def _class_limit(origin: Origin, config: dict[str, Any]) -> str:
    if not origin.labelled:
        return (
            "The model was trained without labels, so its classes have no names, and its classifier may be untrained: fine-tune it "
            "before you classify images."
        )
    return f"The classes are the {config['num_classes']:,} it was trained on:\nany other image is assigned to one of them."


def _measurement(measured: Measured | None) -> str:
    if measured is None:
        return ""
    if measured.weights in (LAST, AVERAGED):
        return f" The reported accuracy is that of the {measured.weights}; the test split was used only after the last epoch."
    return f" The reported accuracy was measured {measured.weights}."


_IMAGES = 'images = torch.zeros(1, 3, *config["size"], dtype=torch.uint8)  # your images: RGB, 0 to 255\n'
_FEED = f"""mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
{_IMAGES}logits = student((images / 255 - mean) / std)
"""
_FEED_UNKNOWN = f"""{_IMAGES}logits = student(images / 255)  # the normalisation is not known: normalise as in the training
"""
_SHOW = 'print([config["classes"][k] if config["classes"] else int(k) for k in logits.argmax(dim=1)])\n'


def _is_normalised(config: dict[str, Any]) -> bool:
    """Whether mean and std of the network's input are known."""
    return bool(config["mean"] and config["std"])


def _feed(config: dict[str, Any]) -> str:
    return _FEED if _is_normalised(config) else _FEED_UNKNOWN


def _needs(model: str) -> str:
    """The code that a custom network needs and that is not in the folder."""
    if not is_code(model):
        return ""
    source = _portable(model).rpartition(":")[0]
    if source.endswith(".py"):
        return f"The network is defined in `{source}`, which is needed and is not part of this folder: copy it into the folder.\n\n"
    return f"The network is defined in the Python module `{source}`, which is needed and is not part of this folder: install it.\n\n"


def _portable(model: str) -> str:
    """The name of a network; of a custom network's file only the file name, since its folder may exist on one machine only."""
    source, _, name = model.rpartition(":")
    return f"{Path(source).name}:{name}" if source.endswith(".py") else model


def _trusted(model: str) -> str:
    """The `model=` argument for a custom network, which must be named: code is not run just because a file names it."""
    return f", model={_portable(model)!r}" if ":" in model else ""


def _plain_loader(config: dict[str, Any], takes_num_classes: bool) -> str:
    if config["changes"]:
        layers = ", ".join(sorted({change["layer"] for change in config["changes"]}))
        return (
            f"The student contains layers of letkd ({layers}), so this folder needs letkd. `letkd export --to onnx` writes a file that "
            "runs without it.\n"
        )
    lines = _network_lines(config["model"], takes_num_classes)
    if lines is None:
        made = "built by transformers, with `num_labels`" if config["model"].startswith(PREFIX) else "part of letkd's zoo"
        return (
            f"Without letkd: the network is {made}; any module with the same parameter names loads "
            f'`{HUB_WEIGHTS}` with `load_state_dict(safetensors.torch.load_file("{HUB_WEIGHTS}"))`.\n'
        )
    first, build = lines
    return f"""Without letkd:

```python
import json
import torch
from safetensors.torch import load_file
{first}

config = json.load(open("{CONFIG}"))
student = {build}.eval()
{_SIZED if config["model"].startswith("timm:") else ""}student.load_state_dict(load_file("{HUB_WEIGHTS}"))
{_feed(config)}```
"""


# A transformer of timm that was trained at another size than its own.
_SIZED = """if hasattr(student, "set_input_size"):
    student.set_input_size(img_size=tuple(config["size"]))
"""


def _network_lines(model: str, takes_num_classes: bool) -> tuple[str, str] | None:
    """The import and the call that build a network without letkd; None if it is in letkd's zoo or needs transformers."""
    if model in IN_TORCHVISION:
        model = f"torchvision:{model}"
    package, colon, name = model.rpartition(":")
    if not colon or package == "transformers":
        return None
    if package == "torchvision":
        return "import torchvision", f'torchvision.models.get_model("{name}", num_classes=config["num_classes"])'
    if package == "timm":
        return "import timm", f'timm.create_model("{name}", num_classes=config["num_classes"])'
    module = Path(package).stem if package.endswith(".py") else package
    argument = 'num_classes=config["num_classes"]' if takes_num_classes else ""
    return f"from {module} import {name}", f"{name}({argument})"
