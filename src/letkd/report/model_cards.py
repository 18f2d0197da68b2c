"""Cards of the zoo's networks with their costs, for `letkd models` and docs/models.md."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from letkd.errors import LetkdError, nearest
from letkd.models import create_model, list_models
from letkd.models.base import MODELS
from letkd.models.cost import macs, parameters
from letkd.taps import as_taps, probe

IMAGENET = (3, 224, 224)
COLUMNS = ("network", "input", "classes", "parameters", "MACs", "stem, stages", "intermediate", "penultimate")
HEAD = """# Networks

Generated from the zoo by `python -m letkd.report.model_cards > docs/models.md`; do not edit by hand. `letkd models` prints the same; use
`--input 64x64` for another image size. MACs are the multiply-accumulates of convolutions and the classifier for one image;
64×8² is a map of 64 channels, 8 high and 8 wide. `letkd.create_model(name, num_classes=…)` builds any of them, and
`letkd taps NAME` lists its modules.

"""
FOOT = """
## Networks from elsewhere

`--student`, `--teacher`, `letkd taps`, `letkd eval` and `create_model` also take

| name | what |
| --- | --- |
| `timm:mobilenetv3_small_100` | a network of timm; `pip install 'letkd[timm]'` |
| `torchvision:resnet18` | a classifier of torchvision; `pip install 'letkd[torchvision]'` |
| `transformers:ResNetConfig` | a configuration class, or a folder with a `config.json`; `pip install 'letkd[transformers]'` |
| `file.py:callable` | a function or class in your own file |
| `package.module:callable` | one in your own package, installed or in the current folder |

These names give only the architecture, and nothing is downloaded. Weights are given separately:

| weights | what |
| --- | --- |
| `--teacher-weights FILE`, `--weights FILE` | safetensors or `.pth`; an error lists keys and shapes that differ |
| `--teacher-weights FOLDER` | with `transformers:…`: a folder written by `save_pretrained`, with safetensors weights |
| `--teacher-weights own` | the callable loads its own weights; with `transformers:FOLDER`, those in the folder |
| `--student-weights FILE` | initial weights; a classifier for other classes is reported, skipped and trained from scratch |

Such a folder is loaded by the transformers library, because parameter names in its files can differ from those of the module. Code in the
folder is not run.

A teacher gets images preprocessed as in its training. letkd's own files, timm's `pretrained_cfg` and a folder's
`preprocessor_config.json` and `config.json` contain mean, std, size and class names. Differences from the data are applied and
reported: images are re-normalised and resized for the teacher (in training, fits and the cache), and its logits are reordered to the
data's classes, by name. A timm transformer is prepared for the size of its images, as teacher and as student: its position embedding is
interpolated. Methods that read the teacher's logits (`kd`, `dkd`, `simkd`, `dist`, `mlkd`, and rows that contain one of them, such as
`srd` and `tdd`) refuse a teacher with other classes. All other methods read only features. `teacher.mean`, `teacher.std`, `teacher.size`
and `teacher.classes` in a recipe take precedence. In Python, use `Distiller(teacher_input=letkd.TeacherInput(…))`.

`letkd taps MODEL` shows the output of every module and proposes `penultimate`, `intermediate`, `stage1` … `stage4` and `pooled`:
modules whose outputs depend on the image and reach the logits. `letkd train` and `letkd compare` use these by default. `--tap
role=path` names the output of a module, `--tap role=path:input` its input, and `--tap role=path:tokens` patch tokens: see
[Foundation models as teachers](foundation-models.md). A model must take a batch of images `[b 3 H W]` and
nothing else, and return logits `[b C]`, as a tensor or as the `logits` of an object or dictionary.

| a model that | |
| --- | --- |
| takes dictionaries or several inputs, returns tuples or lists | wrap it |
| calls a module twice | works; that module cannot have a tap, others can |
| is wrapped in DataParallel, compiled or TorchScript | pass the inner model; as a teacher for logits only it works unchanged |
| has lazy layers | run it once on an input first |
| is in half precision | call `.float()`; `train.precision` sets how training computes |
| works on tokens (vision transformers) or with channels last | works: `--tap role=path:tokens`, `--tap role=path:channels-last` |
| has no classifier, or returns something other than logits | works as a teacher for methods that read only features |
"""


@dataclass(frozen=True)
class Card:
    """Sizes and costs of one network: `maps` by role, each `(d, h, w)`."""

    name: str
    what: str
    input: tuple[int, ...]
    classes: int
    parameters: int
    macs: int
    maps: dict[str, tuple[int, ...]]


def cards(names: Iterable[str] = (), *, size: tuple[int, int] | None = None, num_classes: int | None = None) -> list[Card]:
    """A card for each named network, or for the whole zoo."""
    chosen = list(names) or list_models()
    unknown = [name for name in chosen if name not in MODELS]
    if unknown:
        raise LetkdError(
            f"there is no model {unknown[0]!r} in the zoo; nearest: {nearest(unknown[0], MODELS)}; "
            "for networks from elsewhere see `letkd taps MODEL`"
        )
    return [card(name, size=size, num_classes=num_classes) for name in chosen]


def card(name: str, *, size: tuple[int, int] | None = None, num_classes: int | None = None) -> Card:
    """The card of one network.

    Args:
        size: height and width of the images; default: the network's own.
        num_classes: default: 100, or 1000 for networks of ImageNet's image size.
    """
    model: Any = create_model(name, num_classes=num_classes or 100)
    if num_classes is None and model.input_size == IMAGENET:
        model = create_model(name, num_classes=1000)
    example = torch.zeros(1, *(model.input_size if size is None else (3, *size)))
    roles = {role: tap for role, tap in as_taps(model).items() if re.fullmatch(r"stem|stage\d+|intermediate|penultimate", role)}
    _, features = probe(model, roles, example)
    return Card(
        name,
        (MODELS[name].__doc__ or "").partition("\n")[0],
        tuple(example.shape[1:]),
        model.num_classes,
        parameters(model),
        macs(model, example),
        {role: tuple(f.shape[1:]) for role, f in features.items()},
    )


def rows(found: Iterable[Card]) -> list[tuple[str, ...]]:
    """The cards as text, one column for each of `COLUMNS`."""
    return [
        (
            item.name,
            _times(item.input),
            str(item.classes),
            f"{item.parameters:,}",
            f"{item.macs / 1e6:,.1f} M",
            ", ".join(_times(shape) for role, shape in item.maps.items() if role.startswith("st")),
            _times(item.maps["intermediate"]),
            _times(item.maps["penultimate"]),
        )
        for item in found
    ]


def as_rich(found: Iterable[Card]) -> Table:
    """The table that `letkd models` prints."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("classes", "parameters", "MACs") else "left", no_wrap=True)
    for row in rows(found):
        table.add_row(*row)
    return table


def as_json(found: Iterable[Card]) -> list[dict[str, Any]]:
    """The cards as plain lists and numbers."""
    return [asdict(item) for item in found]


def as_markdown() -> str:
    """The page docs/models.md."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(cards())]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + FOOT


def _times(shape: tuple[int, ...]) -> str:
    d, h, w = shape
    return f"{d}×{h}²" if h == w else f"{d}×{h}×{w}"


if __name__ == "__main__":
    print(as_markdown(), end="")
