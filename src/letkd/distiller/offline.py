"""The offline parts of methods, fitted in one pass of the teacher."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from letkd.batch import UNLABELLED, Batch, check_labels
from letkd.distributed.processes import from_first, objects_of_all, rank
from letkd.errors import DataError
from letkd.methods.base import Fitting
from letkd.progress import bar, say
from letkd.supervision.artefacts import Origin, alone, load_fitted, path_of, save_fitted
from letkd.supervision.shared import finish_of_all


def fit_in_folder(
    fittings: Mapping[str, Fitting],
    folder: Path,
    origins: Mapping[str, Origin],
    fit: Callable[[Mapping[str, Fitting]], None],
    *,
    force: bool,
) -> None:
    """Load the parts that the folder has, by site; fit and save the others. If another run is fitting them, wait for it.

    Args:
        origins: what each part depends on.
        fit: fits the given parts.
        force: fit all parts.
    """
    if not force:
        fittings = _without_loaded(fittings, folder, origins)
    if not fittings:
        return
    paths = {site: path_of(fitting.part, folder, site, origins[site]) for site, fitting in fittings.items()}
    with alone(paths.values()):
        if not force and from_first(any(path.exists() for path in paths.values())):  # another run was faster
            fittings = _without_loaded(fittings, folder, origins)
        if fittings:
            fit(fittings)
        for site, fitting in fittings.items() if rank() == 0 else ():
            save_fitted(fitting.part, folder, site, origins[site])


def _without_loaded(fittings: Mapping[str, Fitting], folder: Path, origins: Mapping[str, Origin]) -> dict[str, Fitting]:
    """The parts that some process could not load."""
    return {
        site: fitting
        for site, fitting in fittings.items()
        if not all(objects_of_all(load_fitted(fitting.part, folder, site, origins[site])))
    }


def fit_parts(
    fittings: Mapping[str, Fitting],
    batches: Iterable[Batch],
    run_teacher: Callable[[Tensor], dict[str, Tensor]],
    *,
    device: torch.device,
    checks: bool,
) -> None:
    """Fit every part, by site, to the teacher's features of all batches; a part that needs labels gets only labelled images.

    Args:
        run_teacher: returns the teacher's features by role.
        device: of the fitted buffers.
        checks: whether labels out of range are an error.
    """
    for fitting in fittings.values():
        fitting.part.reset()
    for batch in batches:
        if not len(batch.y):
            continue  # the batch has fewer images than there are processes
        if batch.y2 is not None:
            raise DataError("fit() got mixed images, but needs unmixed ones; use a loader without mix")
        if checks:
            check_labels(batch.y, None, least=UNLABELLED)
        features = run_teacher(batch.x)  # Alg. 1, offline; Alg. 2, offline: F ← f_t(X; θ_t)
        labelled = batch.labelled()
        for fitting in fittings.values():
            shown = fitting.f_T(features), batch.y, batch.index
            if fitting.part.needs_labels and labelled is not None:
                shown = shown[0][labelled], shown[1][labelled], None if shown[2] is None else shown[2][labelled]
            if len(shown[1]):
                fitting.part.partial_fit(*shown)
    for site, fitting in fittings.items():
        with bar(f"{fitting.part} at {site}: computing labels", None):
            finish_of_all(fitting.part)
        fitting.part.to(device)
        facts = (
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
            for name, value in fitting.part.report_.items()
        )
        say(f"fitted {fitting.part} at {site} ({', '.join(facts)})")
