"""A student that segments images, trained with your own task and a teacher's features. `python examples/segmentation.py`"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import letkd

CLASSES, NO_MASK = 3, -1  # background, disc, square; the mask value of images without a mask


def shapes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images [n 3 32 32] of a disc with horizontal stripes and a square with vertical stripes, and their masks [n 32 32]."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    centre, radius = 6 + 20 * torch.rand(n, 2, 2, 1, 1, generator=g), 3 + 4 * torch.rand(n, 2, 1, 1, generator=g)
    down, across = rows - centre[:, :, 0], columns - centre[:, :, 1]  # [n 2 32 32]
    masks = (down**2 + across**2)[:, 0].lt(radius[:, 0] ** 2).long()
    masks[torch.maximum(down.abs(), across.abs())[:, 1] < radius[:, 1]] = 2
    stripes = torch.stack([torch.zeros(32, 32), 2 * (rows // 2 % 2) - 1, 2 * (columns // 2 % 2) - 1])
    images = stripes.expand(n, -1, -1, -1).gather(1, masks[:, None]).expand(-1, 3, -1, -1)
    return images + torch.randn(n, 3, 32, 32, generator=g), masks


def network(*widths: int) -> nn.Module:
    """Computes maps of half the size, and from each pixel of the last map the classes of 2x2 pixels."""
    layers, d = [], 3
    for k, width in enumerate(widths):
        layers += [nn.Conv2d(d, width, 3, stride=2 if k == 0 else 1, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        d = width
    return nn.Sequential(nn.Sequential(*layers), nn.Conv2d(d, 4 * CLASSES, 1), nn.PixelShuffle(2))


def segment(output: Tensor, batch: letkd.Batch) -> dict[str, Tensor]:
    """The task: cross-entropy per pixel, over the images with a mask."""
    return {"pixels": F.cross_entropy(output, batch.target, ignore_index=NO_MASK)}


def train(distiller: letkd.Distiller, x: Tensor, masks: Tensor, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(distiller.parameters(), lr=0.005)
    has_mask = (masks[:, 0, 0] != NO_MASK).nonzero().squeeze(1)
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):  # half of each batch with masks, half of all images
        some = torch.cat([has_mask[torch.randint(len(has_mask), (8,), generator=g)], torch.randint(len(x), (8,), generator=g)])
        step = distiller((x[some], masks[some]))
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
    return distiller.export()


def mean_iou(model: nn.Module, x: Tensor, masks: Tensor) -> float:
    with torch.no_grad():
        found = model(x).argmax(dim=1)
    both = [((found == c) & (masks == c)).sum() / ((found == c) | (masks == c)).sum() for c in range(CLASSES)]
    return 100 * torch.stack(both).mean().item()


def main(steps: int = 150, with_masks: int = 4) -> dict[str, float]:
    (x, masks), test, example = shapes(300, seed=0), shapes(200, seed=1), torch.zeros(1, 3, 32, 32)
    teacher = train(letkd.Distiller(network(16, 16, 16), task=segment), x, masks, steps)
    few = masks.clone()
    few[with_masks:] = NO_MASK
    scores = {"teacher": mean_iou(teacher, *test)}
    for name in ("student alone", "with the teacher"):
        torch.manual_seed(0)
        taps, taught = {"penultimate": "0"}, name == "with the teacher"
        options = {"student_taps": taps, "teacher_taps": taps, "example": example, "weights": {"kd/penultimate": 0.2}}
        methods = [letkd.methods.letkd1(K=64, tau="auto")] if taught else []
        distiller = letkd.Distiller(
            network(6, 6, 6), teacher if taught else None, methods, task=segment, **(options if taught else {})
        )
        scores[name] = mean_iou(train(distiller.fit([(x, few)]), x, few, steps), *test)
    return scores


if __name__ == "__main__":
    for name, score in main().items():
        print(f"{name}: mIoU {score:.1f} %")
