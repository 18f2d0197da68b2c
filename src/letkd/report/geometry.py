"""Feature geometry: accuracy of a linear classifier on the student's pooled features, before and after its KD layer."""

import torch
from torch import Tensor

from letkd.data import AnySplit, Dataset, Loader
from letkd.data.loader import eval_batch
from letkd.distiller import Distiller
from letkd.inspect.sites import at_rest, layer_path
from letkd.progress import track
from letkd.taps import Tap, Taps


def pooled(distiller: Distiller, data: Dataset, split: AnySplit, role: str) -> tuple[Tensor, Tensor]:
    """Global average of x and of x̂ at a site for every image of a split, each `[n d]`."""
    path = layer_path(distiller, role)
    taps = Taps(distiller.student, {"x": Tap(path, io="input"), "x_hat": Tap(path)})
    x, x_hat = [], []
    with at_rest(distiller):
        for batch in track(Loader(split, eval_batch(split.image_size), mean=data.mean, std=data.std), f"features at {role}"):
            _, features = taps(batch.x)
            x.append(features["x"].mean(dim=(2, 3)))
            x_hat.append(features["x_hat"].mean(dim=(2, 3)))
    return torch.cat(x), torch.cat(x_hat)


def lda_accuracy(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Test accuracy in per cent of LDA fitted to the training features."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    classifier = LinearDiscriminantAnalysis().fit(train.double().numpy(), train_labels.numpy())
    return 100 * float(classifier.score(test.double().numpy(), test_labels.numpy()))


def geometry(distiller: Distiller, data: Dataset, role: str = "intermediate") -> dict[str, float]:
    """Test accuracy of LDA on pooled `x` and on pooled `x_hat`."""
    train, test = data.train.subset(data.train.labels >= 0), data.test
    (x, x_hat), (x_test, x_hat_test) = (pooled(distiller, data, split, role) for split in (train, test))
    y, y_test = train.labels, test.labels
    return {"x": lda_accuracy(x, y, x_test, y_test), "x_hat": lda_accuracy(x_hat, y, x_hat_test, y_test)}
