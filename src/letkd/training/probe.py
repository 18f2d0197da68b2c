"""Probes: accuracy of simple classifiers on a student's features, without training the student."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from letkd.data import AnySplit, Dataset, Loader, load_data
from letkd.data.loader import eval_batch
from letkd.errors import DataError, RecipeError
from letkd.progress import bar, track
from letkd.recipes.schema import Probe
from letkd.taps import Tap, Taps, as_taps, run_once
from letkd.taps.find import proposed_taps

MAX_IMAGES = 10_000  # images to fit a probe, and as many to test it
NEIGHBOURS = 20


def probe_student(student: nn.Module, taps: Mapping[str, Tap | str], like: Dataset, table: Probe) -> dict[str, float]:
    """Test accuracy (%) of a k-nearest-neighbour classifier and of a linear one on the student's features.

        knn      the 20 nearest training images by cosine, weighted by 1/distance
        linear   logistic regression on standardised features, C = 1

    Features are `pooled`, or the mean of `penultimate` over pixels. At most 10,000 training and 10,000 test images are used, evenly
    spaced.

    Args:
        taps: the student's taps, if the network has no table.
        like: the student's training data; the images get its size and normalisation.
        table: names the labelled images.
    """
    data = load_probe(table, like)
    tap = _feature_tap(student, taps, torch.zeros(1, 3, *data.image_size))
    features = {}
    for name, split in (("train", data.train), ("test", data.test)):
        sample = split.subset(torch.linspace(0, len(split) - 1, min(MAX_IMAGES, len(split)), dtype=torch.float64).long())
        features[name] = _features(student, tap, sample, like, f"probe: {name} images of {data.name}"), sample.labels
    with bar(f"probe on {data.name}: {NEIGHBOURS} nearest neighbours and logistic regression", None):
        return _accuracies(*features["train"], *features["test"])


def check_probe(student: nn.Module, taps: Mapping[str, Tap | str], like: Dataset, table: Probe) -> None:
    """Raise an error if the probe cannot be computed after training: missing images, no tap, or images that do not fit the student."""
    example = torch.zeros(1, 3, *load_probe(table, like).image_size)
    run_once(Taps(student, {"features": _feature_tap(student, taps, example)}), example)


def load_probe(table: Probe, like: Dataset) -> Dataset:
    """The labelled images of a probe, at the image size of the student's training."""
    reads_files = table.name in ("folder", "imagenet", "tiny-imagenet")
    data = load_data(table.name, root=table.root, val=0.0, size=like.image_size if reads_files else None)
    if not data.has_labels or not len(data.test):
        raise DataError(f"a probe needs labelled training and test images, and {data.name} lacks them; name another data set")
    if len(data.train.labels.unique()) < 2:
        raise DataError(
            f"a probe needs two classes or more, and the training images of {data.name} have one; name another data set"
        )
    return data


def _feature_tap(student: nn.Module, taps: Mapping[str, Tap | str], example: Tensor) -> Tap:
    known = as_taps(student, taps) or as_taps(student, proposed_taps(student, example)[0])
    for role in ("pooled", "penultimate"):
        if role in known:
            return known[role]
    raise RecipeError(
        f"a probe reads the student's features at the role pooled or penultimate, and {type(student).__name__} names neither: name one "
        "with --tap penultimate=module.path"
    )


@torch.no_grad()
def _features(student: nn.Module, tap: Tap, split: AnySplit, like: Dataset, description: str) -> Tensor:
    first = next(student.parameters(), torch.zeros(()))
    taps, rows = Taps(student, {"features": tap}), []
    loader = Loader(split, eval_batch(split.image_size), mean=like.mean, std=like.std)
    for batch in track(loader, description):
        f = run_once(taps, batch.x.to(first))[1]["features"].float()
        rows.append((f.mean(dim=(2, 3)) if f.ndim == 4 else f.flatten(1)).cpu())
    return torch.cat(rows)


def _accuracies(f: Tensor, y: Tensor, f_test: Tensor, y_test: Tensor) -> dict[str, float]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    engines = {
        "knn": KNeighborsClassifier(min(NEIGHBOURS, len(f)), metric="cosine", weights="distance"),
        "linear": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    }
    fitted = {name: engine.fit(f.double().numpy(), y.numpy()) for name, engine in engines.items()}
    return {name: 100 * float(engine.score(f_test.double().numpy(), y_test.numpy())) for name, engine in fitted.items()}
