"""A student as a folder in the layout of the Hugging Face Hub: weights, config.json and a model card. Nothing is uploaded."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from letkd import __version__
from letkd.deploy.ship import Shipment, ship
from letkd.deploy.source import Source
from letkd.distiller.student import HUB_WEIGHTS, read_header
from letkd.errors import ExportError, LetkdError
from letkd.files import write_whole
from letkd.optional import need
from letkd.recipes.schema import Recipe
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result
from letkd.runs.results import mean_std

CONFIG, CARD = "config.json", "README.md"
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
    """Origin of a student: the recipe and result of its run, and the results of all seeds of that recipe."""

    recipe: Recipe | None = None
    result: Result | None = None
    seeds: tuple[Result, ...] = ()


def origin_of(student: Path) -> Origin:
    """The origin of a student file, read from its run folder; empty if the file is not in a run folder."""
    run = RunFolder(student.parent)
    if not run.exists:
        return Origin()
    own, found = _without_seed(run.recipe), []
    for folder in RunFolder.children(run.path.parent):
        other = RunFolder(folder)
        try:
            if other.result is not None and _without_seed(other.recipe) == own:
                found.append(other.result)
        except LetkdError:
            continue  # another seed's damaged folder is skipped
    return Origin(run.recipe, run.result, tuple(found) or ((run.result,) if run.result else ()))


def _without_seed(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 0})})


def write_hub_folder(
    source: Source, out: Path | None = None, *, fold: bool = True, licence: str | None = None, name: str | None = None
) -> Shipment:
    """Write model.safetensors, config.json and README.md, after checking the weights against the student and validating the card.

    Args:
        out: the folder; default: `hub` next to the student.
        fold: fold the constants of the KD layers into their kernels.
        licence: a licence identifier of the Hub, such as apache-2.0; default: `unknown`.
        name: name of the model in the card; default: made from network, data and method.
    """
    hub = need("huggingface_hub", "hub", "--to hub-folder")
    folder = out or source.path.parent / "hub"
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"--out {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _written_by_letkd(folder):
        raise ExportError(f"--out {folder} contains other files; name a new folder, or one that this command wrote")
    origin = origin_of(source.path)
    header = read_header(source.path)
    title = name or _name(origin, header)
    data = _metadata(hub, title, origin, licence)
    shipment = ship(source, "safetensors", folder / HUB_WEIGHTS, fold=fold)
    facts = shipment.facts
    changes = read_header(shipment.path)["changes"]
    config = {
        "library_name": "letkd",
        "letkd_version": __version__,
        **{key: getattr(facts, key) for key in ("num_classes", "classes", "mean", "std", "size", "resize")},
        "model": header["model"],
        "changes": changes,
        "method": origin.recipe.title if origin.recipe else None,
        "teacher": origin.recipe.teacher.model if origin.recipe and origin.recipe.teacher and origin.recipe.methods else None,
        "data": origin.recipe.data.name if origin.recipe else None,
    }
    card = f"---\n{data.to_yaml()}\n---\n\n{_body(title, origin, config, changes, licence)}"
    parsed = hub.ModelCard(card).data.to_dict()  # the Hub's own parser and checks
    if parsed != data.to_dict():
        raise ExportError("the model card is parsed differently than it was written; this is a bug, please report it")
    write_whole(folder / CONFIG, (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode())
    write_whole(folder / CARD, card.encode())
    return replace(shipment, path=folder)


def _written_by_letkd(folder: Path) -> bool:
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("library_name") == "letkd"
    except (OSError, ValueError, AttributeError):
        return False


def _name(origin: Origin, header: dict[str, Any]) -> str:
    network = str(header["model"]).rpartition(":")[2]
    if origin.recipe is None:
        return network
    return f"{network} on {origin.recipe.data.name}, {origin.recipe.title or 'own recipe'}"


def _metadata(hub: Any, title: str, origin: Origin, licence: str | None) -> Any:
    """The YAML block of the card, built by huggingface_hub."""
    given: dict[str, Any] = {
        "library_name": "letkd",
        "license": licence or "unknown",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "knowledge-distillation", "letkd", "pytorch"],
    }
    if origin.recipe is not None and origin.result is not None and origin.result.last_test is not None:
        data = origin.recipe.data.name
        if data in DATASETS:
            given["datasets"] = [DATASETS[data]]
        given["metrics"] = ["accuracy"]
        given["model_name"] = title
        given["eval_results"] = [
            hub.EvalResult(
                task_type="image-classification",
                dataset_type=DATASETS.get(data, data),
                dataset_name=data,
                dataset_split="test",
                metric_type="accuracy",
                metric_name="top-1 accuracy of this checkpoint, last epoch",
                metric_value=round(origin.result.last_test / 100, 6),
            )
        ]
    try:
        return hub.ModelCardData(**given)
    except ValueError as error:
        raise ExportError(f"huggingface_hub rejects the model card: {str(error).splitlines()[0]}") from None


def _body(title: str, origin: Origin, config: dict[str, Any], changes: list[Any], licence: str | None) -> str:
    recipe = origin.recipe
    rows = [("Network", f"`{config['model']}`"), ("Classes", f"{config['num_classes']:,}")]
    if config["size"]:
        rows.append(("Input", f"RGB, {config['size'][0]}x{config['size'][1]}, normalised by the mean and std in `{CONFIG}`"))
    if recipe is not None:
        rows += [
            ("Data set", recipe.data.name),
            ("Teacher", f"`{config['teacher']}`" if config["teacher"] else "none"),
            ("Method", recipe.title or "own recipe"),
            ("Epochs", str(recipe.train.epochs)),
            ("Seed", str(recipe.train.seed)),
        ]
    if origin.result is not None and origin.result.last_test is not None:
        rows.append(("Test accuracy of this checkpoint", f"{origin.result.last_test:.2f} %, last epoch"))
    if values := [result.last_test for result in origin.seeds if result.last_test is not None]:
        seeds = f"{mean_std(values)} %, n = {len(values)}" if len(values) > 1 else "unknown: only one seed was trained"
        rows.append(("Test accuracy over seeds", seeds))
    rows.append(
        ("Licence", licence or "unknown: choose one before you publish, and check the licences of the data and the teacher")
    )
    table = "".join(f"| {key} | {value} |\n" for key, value in rows)
    data = recipe.data.name if recipe else "the data set it was trained on"
    return f"""# {title}

An image classifier, trained {"by knowledge distillation " if config["teacher"] else ""}with letkd.

| | |
|---|---|
{table}
## How to load it

Run in this folder:

```python
import json
import letkd
import torch

config = json.load(open("{CONFIG}"))
student = letkd.load_student("."{_trusted(config)})
{_FEED}{_SHOW}```

{_plain_loader(config, changes)}
## Limits

The accuracy above was measured on the test split of {data} and says nothing about other images. Do not use the model to decide about
people, for safety, or as the only source of a medical or legal finding. The classes are the {config["num_classes"]:,} it was trained on:
any other image is assigned to one of them.
Errors and biases of {"the teacher and of " if config["teacher"] else ""}the training data may have
been passed on.

## Training

letkd {config["letkd_version"]}. The reported accuracy is that of the last epoch; the test split was read once, at the end of training.
"""


_FEED = """mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
images = torch.zeros(1, 3, *config["size"], dtype=torch.uint8)  # your images: RGB, 0 to 255
logits = student((images / 255 - mean) / std)
"""
_SHOW = 'print([config["classes"][k] if config["classes"] else int(k) for k in logits.argmax(dim=1)])\n'


def _trusted(config: dict[str, Any]) -> str:
    """The `model=` argument for a custom network, which must be named: code is not run just because a file names it."""
    return f", model={config['model']!r}" if ":" in config["model"] else ""


def _plain_loader(config: dict[str, Any], changes: list[Any]) -> str:
    if changes:
        layers = ", ".join(sorted({change["layer"] for change in changes}))
        return (
            f"The student contains layers of letkd ({layers}), so this folder needs letkd. `letkd export --to onnx` writes a file that "
            "runs without it.\n"
        )
    lines = _network_lines(config["model"])
    if lines is None:
        return (
            "Without letkd: the network's definition is part of letkd's zoo; any module with the same parameter names loads "
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
student.load_state_dict(load_file("{HUB_WEIGHTS}"))
{_FEED}```
"""


def _network_lines(model: str) -> tuple[str, str] | None:
    """The import and the call that build a network without letkd; None if the network is only in letkd's zoo."""
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
    return f"from {module} import {name}", f'{name}(num_classes=config["num_classes"])'
