"""Small networks of timm, transformers and torchvision, and what each does as teacher and as student with six methods.

`python -m tests.support.networks` prints the table: what ran, and how many parameters the method added to the student.
"""

import contextlib
import copy
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from letkd import Distiller, KDLayer, find_taps, load_student, methods, progress
from letkd.batch import Batch
from letkd.distiller.student import save_student
from letkd.errors import LetkdError
from letkd.taps import as_logits

C = 3


def torchvision_imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


if importlib.util.find_spec("torchvision") is not None and "torchvision" not in sys.modules and not torchvision_imports():
    # Beside a torch of another build torchvision's compiled operators do not load, and without two of them it does not even
    # import. Its networks need none of them, so their names are enough.
    OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared by another module of the tests
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _timm(name: str, **settings) -> nn.Module:
    import timm  # pyright: ignore[reportMissingImports]

    return timm.create_model(name, **settings)


def _transformers(name: str, num_classes: int, **settings) -> nn.Module:
    import transformers  # pyright: ignore[reportMissingImports]

    config = getattr(transformers, name)(num_labels=num_classes or 2, **settings)
    make = transformers.AutoModelForImageClassification if num_classes else transformers.AutoModel
    return make.from_config(config)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2}
HF_VIT = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
SIGLIP_TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


def timm_vit(num_classes: int) -> nn.Module:
    return _timm("vit_tiny_patch16_224", **VIT, num_classes=num_classes)


def timm_deit_distilled(num_classes: int) -> nn.Module:
    return _timm("deit_tiny_distilled_patch16_224", **VIT, num_classes=num_classes)


def timm_dinov2_reg(num_classes: int) -> nn.Module:
    return _timm("vit_small_patch14_reg4_dinov2", **VIT, num_classes=num_classes)


def timm_swin(num_classes: int) -> nn.Module:
    small = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
    return _timm("swin_tiny_patch4_window7_224", **small, num_classes=num_classes)


def timm_convnext(num_classes: int) -> nn.Module:
    return _timm("convnext_atto", depths=(1, 1, 1, 2), dims=(8, 12, 16, 24), num_classes=num_classes)


def timm_mobilevit(num_classes: int) -> nn.Module:
    return _timm("mobilevit_xxs", num_classes=num_classes)


def timm_efficientnet(num_classes: int) -> nn.Module:
    return _timm("efficientnet_lite0", num_classes=num_classes)


def timm_mobilenetv3(num_classes: int) -> nn.Module:
    return _timm("mobilenetv3_small_050", num_classes=num_classes)


def timm_regnet(num_classes: int) -> nn.Module:
    return _timm("regnetx_002", num_classes=num_classes)


def transformers_vit(num_classes: int) -> nn.Module:
    return _transformers("ViTConfig", num_classes, **HF_VIT, intermediate_size=32)


def transformers_dinov2(num_classes: int) -> nn.Module:
    return _transformers("Dinov2Config", num_classes, **HF_VIT)


def transformers_dinov2_reg(num_classes: int) -> nn.Module:
    return _transformers("Dinov2WithRegistersConfig", num_classes, **HF_VIT, num_register_tokens=4)


def transformers_swin(num_classes: int) -> nn.Module:
    small = {"embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4}
    return _transformers("SwinConfig", num_classes, **small)


def transformers_convnext(num_classes: int) -> nn.Module:
    return _transformers("ConvNextConfig", num_classes, hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 2])


def transformers_siglip(num_classes: int) -> nn.Module:
    vision = {**HF_VIT, "intermediate_size": 32}
    if not num_classes:
        return _transformers("SiglipVisionConfig", 0, **vision)
    return _transformers("SiglipConfig", num_classes, vision_config=vision, text_config=SIGLIP_TEXT)


def transformers_resnet(num_classes: int) -> nn.Module:
    return _transformers("ResNetConfig", num_classes, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")


def torchvision_vit(num_classes: int) -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]

    return torchvision.models.VisionTransformer(32, 8, 4, 2, 24, 32, num_classes=num_classes)


def torchvision_swin(num_classes: int) -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]

    return torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4], num_classes=num_classes)


def torchvision_mobilenetv3(num_classes: int) -> nn.Module:
    import torchvision  # pyright: ignore[reportMissingImports]

    return torchvision.models.mobilenet_v3_small(num_classes=num_classes, width_mult=0.5)


TINY = [timm_vit, timm_deit_distilled, timm_dinov2_reg, timm_swin]
TINY += [transformers_vit, transformers_dinov2, transformers_dinov2_reg, transformers_swin, transformers_siglip]
TINY += [transformers_resnet, torchvision_vit, torchvision_swin]
LARGER = [timm_convnext, timm_mobilevit, timm_efficientnet, timm_mobilenetv3, timm_regnet, transformers_convnext]
LARGER += [torchvision_mobilenetv3]
NETWORKS: dict[str, Callable[[int], nn.Module]] = {make.__name__: make for make in [*TINY, *LARGER]}

METHODS: dict[str, Callable[[], methods.Method]] = {
    "letkd-1": lambda: methods.letkd1(6),
    "letkd-2": lambda: methods.letkd2(6, 2),
    "quest": lambda: methods.quest(6),
    "fitnet": lambda: methods.FitNet("penultimate"),
    "kd": methods.KD,
    "crd": lambda: methods.CRD(K=4, feat_dim=6),
}


class Partner(nn.Module):
    """A small CNN for the other side, with maps of any size."""

    def __init__(self, stride: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, stride, stride=stride), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(2)))
        self.fc = nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def size_of(name: str) -> int:
    return 64 if NETWORKS[name] in LARGER else 32


def batches(size: int, n: int = 12, b: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    x, y, index = torch.randn(n, 3, size, size, generator=generator), torch.arange(n) % C, torch.arange(n)
    return [Batch(*parts) for parts in zip(x.split(b), y.split(b), index.split(b), strict=True)]


def distiller(name: str, role: str, method: str, *, headless: bool = False) -> Distiller:
    """The network as `role`, a CNN with maps of the same size as the other side; taps as `find_taps` proposes them."""
    torch.manual_seed(0)
    example = torch.zeros(1, 3, size_of(name), size_of(name))
    network = NETWORKS[name](0 if headless else C)
    partner = Partner(find_taps(network, example)["penultimate"].stride or 1)
    student, teacher = (network, partner) if role == "student" else (partner, network)
    taps = {f"{who}_taps": find_taps(net, example) for who, net in (("student", student), ("teacher", teacher))}
    return Distiller(student, teacher, METHODS[method](), **taps, example=example)


def train(made: Distiller, stream: list[Batch], state: dict | None = None) -> tuple[dict, list[float]]:
    """One pass over the stream, from a state on; returns the last state and the losses."""
    optimizer = torch.optim.SGD((p for p in made.parameters() if p.requires_grad), lr=0.01, momentum=0.9)
    if state is not None:
        state = copy.deepcopy(state)  # the optimiser goes on in the tensors that it is given
        made.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    losses = []
    for batch in stream:
        optimizer.zero_grad()
        step = made(batch)
        step.loss.backward()
        optimizer.step()
        losses.append(step.loss.item())
    state = {"model": made.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    return copy.deepcopy(state), losses


def run(name: str, role: str, method: str, folder: Path) -> int:
    """Fit, train, resume, write and open the student; raises if something is not as it should be. Parameters added to the student."""
    stream = batches(size_of(name))
    first = distiller(name, role, method).fit(stream)
    before = {key: value.clone() for key, value in first.teacher.state_dict().items()}
    half, _ = train(first.train(), stream[:1])
    whole, losses = train(first, stream[1:], half)
    again = distiller(name, role, method).train()
    resumed, repeated = train(again, stream[1:], half)
    assert losses == repeated, "another loss after resuming"
    assert all(torch.equal(value, resumed["model"][key]) for key, value in whole["model"].items()), "other weights"
    assert all(torch.equal(value, before[key]) for key, value in first.teacher.state_dict().items()), "the teacher changed"
    student, x = first.export(), stream[0].x
    with torch.no_grad():
        logits = as_logits(student(x), student)
        assert torch.isfinite(logits).all(), "logits that are not finite"
        if role == "student":
            model = f"tests.support.networks:{name}"
            save_student(student, folder / "student.safetensors", model=model, num_classes=C)
            loaded = load_student(folder / "student.safetensors", model=model)
            assert torch.equal(as_logits(loaded(x), loaded), logits), "another network after loading"
    return sum(p.numel() for layer in student.modules() if isinstance(layer, KDLayer) for p in layer.parameters())


def main() -> None:
    progress.set_quiet(True)
    torch.set_num_threads(1)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in NETWORKS:
        for role in ("teacher", "student"):
            row = found.setdefault((name, role), {})
            for method in METHODS:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        added = run(name, role, method, Path(folder))
                        row[method] = f"+{added:,}" if added else "✓"
                    except LetkdError as error:
                        row[method] = f"refused: {error}"
            print(f"| {name.replace('_', ' ', 1)} | {role} | {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    print(f"| network | as | {' | '.join(METHODS)} |\n| --- | --- |{' --- |' * len(METHODS)}")
    main()
