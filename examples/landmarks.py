"""A student that predicts landmarks, trained with your own task. `python examples/landmarks.py`"""

import torch
from torch import Tensor, nn

import letkd

POINTS = 3


def faces(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images [n 3 32 32] of three soft spots, one per channel, and their positions [n 6], rows and columns from -1 to 1."""
    g = torch.Generator().manual_seed(seed)
    points = 1.4 * torch.rand(n, POINTS, 2, generator=g) - 0.7
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij"))
    distance = (grid - points[..., None, None]).square().sum(dim=2)  # [n 3 32 32]
    return torch.exp(-distance / 0.02) + 0.3 * torch.randn(n, 3, 32, 32, generator=g), points.flatten(1)


def network(*widths: int) -> nn.Module:
    layers, d = [], 3
    for width in widths:
        layers += [nn.Conv2d(d, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        d = width
    return nn.Sequential(nn.Sequential(*layers), nn.Conv2d(d, POINTS, 1), Centre())


class Centre(nn.Module):
    """The centre of mass of every map, soft-max over its pixels: [b POINTS h w] to [b 2·POINTS]."""

    def forward(self, maps: Tensor) -> Tensor:
        mass, (h, w) = maps.flatten(2).softmax(dim=2).view_as(maps), maps.shape[-2:]
        row = (mass.sum(dim=3) * torch.linspace(-1, 1, h)).sum(dim=2)
        column = (mass.sum(dim=2) * torch.linspace(-1, 1, w)).sum(dim=2)
        return torch.stack([row, column], dim=2).flatten(1)


def locate(output: Tensor, batch: letkd.Batch) -> dict[str, Tensor]:
    """The task: a term for the distance, and one that keeps the points' centre in place."""
    points = (output - batch.target).unflatten(1, (POINTS, 2))
    return {"points": points.square().mean(), "centre": points.mean(dim=1).square().mean()}


def train(distiller: letkd.Distiller, x: Tensor, points: Tensor, steps: int) -> nn.Module:
    optimizer, g = torch.optim.Adam(distiller.parameters(), lr=0.01), torch.Generator().manual_seed(0)
    for _ in range(steps):
        some = torch.randint(len(x), (16,), generator=g)
        step = distiller((x[some], points[some]))
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
    return distiller.export()


def error(model: nn.Module, x: Tensor, points: Tensor) -> float:
    """Mean distance to the true points, in pixels."""
    with torch.no_grad():
        return 16 * (model(x) - points).unflatten(1, (POINTS, 2)).norm(dim=2).mean().item()


def main(steps: int = 150, n: int = 64) -> dict[str, float]:
    many, few, test = faces(500, seed=0), faces(n, seed=1), faces(200, seed=2)
    teacher = train(letkd.Distiller(network(16, 32), task=locate), *many, steps)
    student, taps = network(8, 16), {"penultimate": "0"}
    method = letkd.methods.quest(K=64, tau="auto")  # no layer in the student: its convolution already reads positions
    weights = {"centre": 0.5, "kd/penultimate": 0.1}
    distiller = letkd.Distiller(
        student, teacher, method, task=locate, weights=weights, student_taps=taps, teacher_taps=taps, example=test[0][:1]
    )
    found = {"teacher": teacher, "student": train(distiller.fit([few]), *few, steps)}
    return {"middle of the image": 16 * test[1].unflatten(1, (POINTS, 2)).norm(dim=2).mean().item()} | {
        name: error(model, *test) for name, model in found.items()
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, pixels in main().items():
        print(f"{name}: {pixels:.2f} pixels")
