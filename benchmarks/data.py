"""Batched crop and flip, relative to a per-image PIL pipeline, and the cost of batches as a share of a training step.

    python benchmarks/data.py [--images 4096] [--batch 128] [--rounds 5] [--check | --record]

Both pipelines return normalised float images of 32x32 after a random crop with reflected padding of 4 and a random flip. The
second table adds RandAugment, TrivialAugment, erasing and mixing to the batched pipeline, one at a time.
"""

import random
from collections import deque
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

import letkd
from letkd.data import Chain, CropFlip, Erase, Loader, Mix, RandAugment, Split, TrivialAugment
from timing import begin, compare_with_recorded, device_title, interleaved, parser, show

MEAN, STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
WAYS = {
    "crop": {"augment": CropFlip()},
    "crop+randaugment": {"augment": Chain((CropFlip(), RandAugment()))},
    "crop+trivial": {"augment": Chain((CropFlip(), TrivialAugment()))},
    "crop, erase 0.5": {"augment": Chain((CropFlip(), Erase(0.5)))},
    "crop, mixup": {"augment": CropFlip(), "mix": Mix("mixup")},
    "crop, cutmix": {"augment": CropFlip(), "mix": Mix("cutmix")},
}


def by_pil(images: list[np.ndarray], batch: int) -> None:
    """One image at a time, as in the `__getitem__` of a data set."""
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    order = random.sample(range(len(images)), len(images))
    for start in range(0, len(order), batch):
        made = []
        for i in order[start : start + batch]:
            picture = Image.fromarray(np.pad(images[i], ((4, 4), (4, 4), (0, 0)), mode="reflect"))
            left, top = random.randint(0, 8), random.randint(0, 8)
            picture = picture.crop((left, top, left + 32, top + 32))
            picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
            x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
            made.append((x - mean) / std)
        torch.stack(made)


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--images", type=int, default=4096)
    arguments.add_argument("--batch", type=int, default=128)
    args = begin(arguments)
    split = Split(torch.randint(256, (args.images, 3, 32, 32), dtype=torch.uint8), torch.arange(args.images) % 100)
    pictures = list(split.images.permute(0, 2, 3, 1).contiguous().numpy())
    loaders = {way: Loader(split, args.batch, mean=MEAN, std=STD, shuffle=True, **options) for way, options in WAYS.items()}
    student = letkd.create_model("resnet20", num_classes=100)
    x, y = torch.randn(args.batch, 3, 32, 32), torch.arange(args.batch) % 100
    steps = -(-args.images // args.batch)

    def step() -> None:
        F.cross_entropy(student(x), y).backward()
        student.zero_grad()

    cases = {way: partial(deque, loader, 0) for way, loader in loaders.items()}  # one epoch; batches are discarded
    times = interleaved({"PIL": lambda: by_pil(pictures, args.batch), **cases, "step": step}, args.rounds)
    per = {name: args.images / times[name] for name in ("PIL", "crop")} | {"step": args.batch / times["step"]}
    share = {way: times[way] / steps / times["step"] for way in WAYS}
    show(
        f"{args.images} images of 32x32, batches of {args.batch}; {device_title()}",
        ["way", "images a second", "/ PIL"],
        [[name, f"{rate:,.0f}", f"{rate / per['PIL']:.1f}"] for name, rate in per.items()],
    )
    show(
        "a batch, in milliseconds and as a share of a resnet20 step",
        ["way", "ms", "% of a step"],
        [[way, f"{1000 * times[way] / steps:.2f}", f"{100 * part:.2f}"] for way, part in share.items()],
    )
    compare_with_recorded(
        args, "data", {"batched / PIL": times["crop"] / times["PIL"]} | {f"{way} / step": part for way, part in share.items()}
    )


if __name__ == "__main__":
    main()
