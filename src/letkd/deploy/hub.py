"""A student as a folder in the layout of the Hugging Face Hub: weights, config.json and a model card. Nothing is uploaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from letkd import __version__
from letkd.deploy.card import CONFIG, Origin, body, metadata
from letkd.deploy.ship import Shipment, ship
from letkd.deploy.source import AVERAGED, LAST, Measured, Source, measured_in_run
from letkd.distiller.student import HUB_WEIGHTS, read_header
from letkd.errors import ExportError, LetkdError
from letkd.files import write_whole
from letkd.models.base import is_code, takes_num_classes
from letkd.optional import need
from letkd.runs.folder import RunFolder
from letkd.runs.records import Result

CARD = "README.md"


def origin_of(source: Source) -> Origin:
    """The origin of a student, read from the run folder that contains its file; empty if the file is not in a run folder.

    An accuracy is given only if it was measured for this student: the run's last epoch or its averaged weights, or after pruning.
    """
    run = RunFolder(source.path.parent)
    if not run.exists:
        return Origin(measured=source.measured)
    labelled = run.result is None or run.result.last_test is not None
    measured = source.measured if source.pruned else measured_in_run(source.path)
    return Origin(run.recipe, measured, _seeds(run, measured), labelled)


def _seeds(run: RunFolder, measured: Measured | None) -> tuple[float, ...]:
    """The test accuracies of the same weights over all seeds of the run's recipe; none if the student was pruned."""
    key = {LAST: "last_test", AVERAGED: "ema_test"}.get(measured.weights) if measured else None
    if measured is None or key is None:
        return ()
    found = list[Result]()
    for other in (run, *run.other_seeds()):
        try:
            found += [] if other.result is None else [other.result]
        except LetkdError:
            continue  # another seed's damaged result is skipped
    return tuple(value for result in found if (value := getattr(result, key)) is not None) or (measured.top1,)


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
    origin = origin_of(source)
    header = read_header(source.path)
    title = name or _name(origin, header)
    data = metadata(hub, title, origin, licence)
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
    counted = not is_code(source.name) or takes_num_classes(source.name)
    card = f"---\n{data.to_yaml()}\n---\n\n{body(title, origin, config, licence, takes_num_classes=counted)}"
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
