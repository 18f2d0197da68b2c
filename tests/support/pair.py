"""A tiny pair of networks, images and features to train and fit them on, and loops over them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.distiller import Distiller
from letkd.methods import Method
from letkd.taps import Tap

C = 3
SIZE = (16, 16)
TAPS: dict[str, Tap | str] = {
    "stem": "first",
    "stage1": "first",
    "stage1.preact": Tap("first.2", io="input"),
    "stage2": "last.0",
    "stage2.preact": Tap("last.0.relu", io="input"),
    "stage3": "last",
    "stage3.preact": Tap("last.1.relu", io="input"),
    "pooled": Tap("fc", io="input"),
    "intermediate": "last.0",
    "intermediate.conv3x3": "last.0.conv",
    "penultimate": "last",
    "penultimate.conv3x3": "last.1.conv",
}


class Block(nn.Module):
    """A plain residual block: relu(BN(3x3(x)) + 1x1(x))."""

    def __init__(self, d_in: int, d_out: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(d_out)
        self.shortcut = nn.Conv2d(d_in, d_out, 1, stride=stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + self.shortcut(x))


class Net(nn.Module):
    """Somebody's own classifier: no table of taps, no registry, maps a quarter (or `stride` · 2) of the input's size."""

    def __init__(self, d: int, *, stride: int = 2, num_classes: int = C):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, d, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(d), nn.ReLU())
        self.last = nn.Sequential(Block(d, 2 * d, stride), Block(2 * d, 2 * d, 1))
        self.fc = nn.Linear(2 * d, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.last(self.first(x)).mean(dim=(2, 3)))


def images(n: int, *, size: tuple[int, int] = SIZE, seed: int = 0, num_classes: int = C) -> tuple[Tensor, Tensor]:
    """Noise with a colour for each class, so that there is something to learn."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % num_classes
    return torch.randn(n, 3, *size, generator=g) + torch.eye(num_classes, 3)[y][:, :, None, None], y


def a_stream(n: int = 24, *, size: tuple[int, int] = SIZE, batch: int = 8) -> list[Batch]:
    """Batches of images with a second view."""
    x, y = images(n, size=size)
    parts = (part.split(batch) for part in (x, y, torch.arange(n), images(n, size=size, seed=1)[0]))
    return [Batch(x, y, index, second=second) for x, y, index, second in zip(*parts, strict=True)]


def a_net(d: int, *, seed: int, **options) -> Net:
    """A network as after some training: BN has statistics and affine values of its own."""
    torch.manual_seed(seed)
    net = Net(d, **options)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.momentum = None  # an average over all batches
    with torch.no_grad():
        for batch in a_stream():
            net(batch.x)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return net


def a_teacher(seed: int = 100) -> Net:
    return a_net(5, seed=seed)


def a_student(pair: str = "equal", seed: int = 0) -> Net:
    """`equal`: the teacher's architecture. `unequal`: other channels, and maps of half the teacher's size."""
    return a_net(5, seed=seed) if pair == "equal" else a_net(4, seed=seed, stride=4)


def a_distiller(
    method: Method | list[Method],
    pair: str = "equal",
    *,
    seed: int = 0,
    student: nn.Module | None = None,
    teacher: nn.Module | None = None,
    **options,
) -> Distiller:
    student, teacher = student or a_student(pair, seed), teacher or a_teacher()
    options = {"student_taps": TAPS, "teacher_taps": TAPS, "example": torch.zeros(1, 3, *SIZE), **options}
    torch.manual_seed(seed)
    return Distiller(student, teacher, method, **options)


def steps(distiller: Distiller, batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
    """A training loop of one's own; returns the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        step = distiller(batch)
        step.loss.backward()
        optimizer.step()
        losses.append(step.loss.item())
    return losses


def features(n: int = 12, d: int = 4, *, h: int = 3, w: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Teacher's maps whose pixels tell the class, in part: f_T [n d h w], y [n], index [n]."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    means = 1.5 * torch.randn(C, d, generator=g)
    f_T = torch.randn(n, d, h, w, generator=g) + means[y][:, :, None, None]
    return f_T, y, torch.arange(n)


def in_batches(parts: tuple[Tensor, ...], batch: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(batch) for part in parts), strict=True))


def same_state(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
