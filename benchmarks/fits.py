"""The offline fits, relative to the teacher's forward pass over the same images, and to scikit-learn on the same pixels.

    python benchmarks/fits.py [--images 2000] [--teacher resnet56] [--K 4096] [--sklearn] [--check | --record]

Times are for the given number of images; all except the clustering grow in proportion to it (CIFAR-100 has 50,000 images, 64
pixels of 64 channels each). Memory is the increase of the process's peak memory during the fit. `--sklearn` adds scikit-learn's
LDA and K-means, which hold all pixels in memory.
"""

import resource
from collections.abc import Callable, Iterator

import torch

import letkd
from letkd.functional import pixels
from letkd.supervision import KMeansSupervision, SubclassSupervision
from letkd.taps import Taps
from timing import begin, compare_with_recorded, device_title, parser, seconds, show

C, BATCH = 100, 128


def peak() -> float:
    """Peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    arguments = parser(__doc__, rounds=1)
    arguments.add_argument("--images", type=int, default=2000)
    arguments.add_argument("--teacher", default="resnet56")
    arguments.add_argument("--K", type=int, default=4096)
    arguments.add_argument("--pixels-per-centre", type=int, default=16, help="for K-means by faiss; recipes use 256")
    arguments.add_argument("--sklearn", action="store_true")
    args = begin(arguments)
    teacher = letkd.create_model(args.teacher, num_classes=C).eval()
    taps = Taps(teacher, {role: teacher.taps[role] for role in ("penultimate", "intermediate")})
    means = torch.randn(C, 3, 8, 8)
    y = torch.arange(args.images) % C
    made: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []

    @torch.no_grad()
    def forward() -> None:
        for part in torch.arange(args.images).split(BATCH):
            x = torch.randn(len(part), 3, 32, 32) + means[y[part]].repeat_interleave(4, 2).repeat_interleave(4, 3)
            made.append(({role: f.clone() for role, f in taps(x)[1].items()}, y[part]))

    def stream(role: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((features[role], labels) for features, labels in made)

    subclass = SubclassSupervision(8)
    subclass.bind("intermediate", d=64, C=C)
    kmeans = KMeansSupervision(args.K, pixels_per_centre=args.pixels_per_centre, scale_free=True)
    minibatch = KMeansSupervision(args.K, engine="minibatch", scale_free=True)
    cases: dict[str, Callable[[], object]] = {
        "the teacher's forward": forward,
        "LDA + sub-classes + table": lambda: subclass.fit(stream("intermediate")),
        f"K-means, K={args.K}, {args.pixels_per_centre} pixels per centre, faiss": lambda: kmeans.fit(stream("penultimate")),
        f"K-means, K={args.K}, mini-batches": lambda: minibatch.fit(stream("penultimate")),
    }
    if args.sklearn:
        from sklearn.cluster import MiniBatchKMeans
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

        def rows(role: str):
            return torch.cat([pixels(features[role]) for features, _ in made]).numpy()

        def labels():
            return torch.cat([label.repeat_interleave(64) for _, label in made]).numpy()

        cases["scikit-learn LDA (svd)"] = lambda: LinearDiscriminantAnalysis().fit(rows("intermediate"), labels())
        cases[f"scikit-learn MiniBatchKMeans, K={args.K}"] = lambda: MiniBatchKMeans(
            args.K, batch_size=16384, n_init=1, max_iter=1, init="random"
        ).fit(rows("penultimate"))
    shown, ratios, unit = [], {}, 1.0
    for name, run in cases.items():
        before = peak()
        taken = seconds(run)
        unit = taken if not shown else unit
        shown.append([name, f"{taken:.1f}", f"{taken / unit:.2f}", f"{peak() - before:.0f}"])
        ratios[name] = taken / unit
    show(
        f"{args.images} images, {64 * args.images:,} pixels of 64 channels; {device_title()}",
        ["fit", "s", "/ forward", "memory increase (MB)"],
        shown,
    )
    sample = torch.cat([pixels(features["penultimate"]) for features, _ in made])[:: max(1, args.images // 250)]
    faiss, minibatches = (torch.cdist(sample, fitted.rho_).amin(dim=1).square().mean().item() for fitted in (kmeans, minibatch))
    print(f"mean squared distance to the nearest centre: faiss {faiss:.4g}, mini-batches {minibatches / faiss:.2f} of that")
    compare_with_recorded(args, "fits", ratios)


if __name__ == "__main__":
    main()
