"""The teacher paid for once: what steps need of it, for a few fixed views of every image, in memory-mapped shards on disk.

A loader with `views=V` shows every image in V fixed ways, one per epoch in turn. What the teacher says of a view is then the same every
time, so it is computed once, when the view is first shown, and read from then on:

- p_T of a site (QUEST, letKD): of every pixel the labels above 1e-4 of its largest, scaled to sum to one; numbers in 16 bits,
  probabilities in half precision (a relative error of 2^-11 at most). Sub-class decisions are one number per pixel, exact.
- logits and pooled features (KD, DKD, DIST, CRD, SRD): in single precision, exact for a run in single precision.
- methods that read whole maps of the teacher (AT, FitNet, SP, VID, FSP, AB, ReviewKD, SimKD) cannot use it and get an error; nor can
  MLKD, which needs two views per step.

A shard is a function of teacher, data, view and settings alone, whose fingerprint names its folder: not of the run, its seed, its
order or its processes. So runs share it, and a run has the same numbers whether it made the shards or found them.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from letkd.batch import Batch
from letkd.data.loader import EVAL_BATCH, VIEWS, Loader, eval_batch
from letkd.distiller.packing import KEPT, pack, unpack, widen
from letkd.distributed.processes import from_first, rank, sum_of_all, wait_for_all, world
from letkd.errors import DataError, InUseError, NonFiniteError
from letkd.files import hold, write_whole
from letkd.methods.base import Fitting
from letkd.progress import bar, say
from letkd.supervision.base import Supervision
from letkd.supervision.labels import Labels
from letkd.tensors import checksum, fingerprint

if TYPE_CHECKING:
    from letkd.distiller.distiller import Distiller

FORMAT = "letkd-cache-1"
SHARD = 32 * EVAL_BATCH  # images of a shard
WAIT_SECONDS = 0.2  # between looks at a shard that another run is making


@dataclass(frozen=True)
class Vectors:
    """Features that are one vector per image."""

    role: str

    def pack(self, features: Mapping[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        return {"value": features[self.role].float()}

    def unpack(self, packed: dict[str, Tensor], teacher: dict[str, Tensor], labels: dict[str, Labels]) -> None:
        teacher[self.role] = packed["value"]

    def origin(self, distiller: "Distiller") -> dict[str, Any]:
        return {"tap": distiller.tap_path(self.role)}


@dataclass(frozen=True)
class PixelLabels:
    """p_T of a site."""

    site: str
    fitting: Fitting[Supervision]
    predicts: bool  # whether the teacher predicts the student's classes

    def pack(self, features: Mapping[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        supervision = self.fitting.part
        if self.predicts and supervision.unlabelled == "teacher":
            y = torch.where(y < 0, features["logits"].argmax(dim=1), y)
        y = y.clamp_min(0)  # labels of any class for images that no step reads labels of
        return pack(supervision.labels(self.fitting.f_T(features), y))

    def unpack(self, packed: dict[str, Tensor], teacher: dict[str, Tensor], labels: dict[str, Labels]) -> None:
        labels[self.site] = unpack(packed, self.fitting.part)

    def origin(self, distiller: "Distiller") -> dict[str, Any]:
        supervision = self.fitting.part
        return {
            "tap": distiller.tap_path(self.fitting.role),
            **(
                {"pooled": self.fitting.match.ratio}
                if self.fitting.match.size is None
                else {"resized": self.fitting.match.size}
            ),
            "supervision": {"kind": supervision.kind, **supervision.settings(), **supervision.label_settings(), "kept": KEPT},
            "fitted": checksum(
                {name: held for name, held in supervision.named_buffers() if name in supervision.fitted_buffers}
            ),
        }


Item = Vectors | PixelLabels


class Shard:
    """What is kept of consecutive images: in each tensor, every image has rows of its own, in order.

    Args:
        tensors: if there is a `count`, it says how many rows each pixel has in the other tensors; otherwise all images have equally many.
        n: images.
    """

    def __init__(self, tensors: dict[str, Tensor], n: int):
        self.tensors = tensors
        count = widen(tensors["count"]).view(n, -1).sum(dim=1) if "count" in tensors else None
        self._first: dict[str, Tensor] = {}  # row of each image, and the one behind the last
        for name, rows in tensors.items():
            size = torch.full((n,), len(rows) // n) if count is None or name == "count" else count
            self._first[name] = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(dim=0)])

    def image(self, i: int) -> dict[str, Tensor]:
        return {name: rows[self._first[name][i] : self._first[name][i + 1]] for name, rows in self.tensors.items()}


class TeacherCache:
    """Set as `distiller.cache`, it answers in the teacher's place for batches of a loader with fixed views.

    Args:
        distiller: fitted, on its device.
        loader: shows the training images; `loader.views` says in how many ways.
        folder: where shards are kept; runs may share it, at the same time, too.
    """

    def __init__(self, distiller: "Distiller", loader: Loader, folder: str | Path):
        if not loader.views:
            raise DataError("a cache of the teacher needs a loader that shows fixed views: Loader(views=10)")
        self.distiller, self.loader, self.folder = distiller, loader, Path(folder)
        self._shards: dict[str, list[Shard]] = {}
        self._ready: tuple[int, tuple[str, ...]] | None = None
        self._sound: set[Path] = set()  # files whose checksum was seen to be right
        self._told: set[int] = set()

    def read(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Labels]]:
        """What the teacher says of a batch: features by role, labels by site. A view that is not there yet is made first."""
        if batch.view is None or batch.index is None:
            raise DataError("a cache of the teacher knows images by index and view, and the batch has none: use its own loader")
        items = self._items()
        if self._ready != (batch.view, tuple(items)):
            self.prepare(batch.view)
        teacher: dict[str, Tensor] = {}
        labels: dict[str, Labels] = {}
        index = batch.index.tolist()
        for name, item in items.items():
            packed = _joined([self._shards[name][i // SHARD].image(i % SHARD) for i in index])
            item.unpack({key: rows.to(batch.x.device) for key, rows in packed.items()}, teacher, labels)
        return teacher, labels

    def prepare(self, view: int, heed: Callable[[], object] = lambda: None) -> None:
        """Make the shards of a view that are missing or damaged, all processes their share, and open them.

        Args:
            heed: called by all processes after each shard that they make, and while they wait for one that another run is making; it
                may raise to stop.
        """
        items, origins, began = self._items(), self._origins(), time.monotonic()
        n = -(-len(self.loader.split) // SHARD)
        missing = from_first([s for s in range(n) if not all(self._open(name, o, view, s) for name, o in origins.items())])
        mine, waited = missing[rank() :: world()], False
        title = f"view {view + 1} of {self.loader.views}: {', '.join(items)} of the teacher"
        device = self._teacher()[1] if missing else None
        with bar(title, len(mine)) as tick:
            while missing and sum_of_all(torch.tensor([len(mine)], device=device)).item():
                made = next((s for s in mine if self._make_alone(items, origins, view, s)), None)
                if made is not None:
                    mine.remove(made)
                    tick()
                elif mine:
                    if not waited:
                        say(f"{title}: another run is making it; waiting")
                    waited = True
                    time.sleep(WAIT_SECONDS)
                heed()
        wait_for_all()
        self._shards = {name: [self._opened(name, origins, view, s) for s in range(n)] for name in items}
        self._ready = view, tuple(items)
        if items and (missing or view not in self._told):
            self._told.add(view)
            paths = [self._path(name, origin, view, s) for name, origin in origins.items() for s in range(n)]
            size = sum(path.stat().st_size for path in paths) / 1e6
            took = f"made in {time.monotonic() - began:.0f} s" if missing else "found"
            say(f"{title}: {took}, {len(self.loader.split):,} images, {size:,.1f} MB in {self.folder}")

    def _items(self) -> dict[str, Item]:
        lessons = self.distiller.lessons()
        items: dict[str, Item] = {role: Vectors(role) for role in lessons.vectors}
        same = self.distiller.same_classes
        return items | {f"p_T at {site}": PixelLabels(site, fitting, same) for site, fitting in lessons.labels.items()}

    def _origins(self) -> dict[str, str]:
        """All that an item's shards depend on, by item, as a text."""
        teacher, device, dtype = self._teacher()
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
        loader = self.loader
        shared = {
            "format": f"{FORMAT}, {SHARD} images a shard, {eval_batch(loader.split.image_size)} at a time, views {VIEWS}",
            "teacher": f"{type(teacher).__name__} {fingerprint(teacher)} in {cast}",
            "images": f"{loader.split.fingerprint()} mean {list(loader.mean)} std {list(loader.std)}",
            "augment": f"{type(loader.augment).__name__} {vars(loader.augment)}",
        }
        if self.distiller.teacher_input is not None:
            shared |= {"teacher's input": str(seen)} if (seen := self.distiller.teacher_input.differences()) else {}
        return {
            name: json.dumps({**shared, "item": name, **item.origin(self.distiller)}, sort_keys=True)
            for name, item in self._items().items()
        }

    def _teacher(self) -> tuple[torch.nn.Module, torch.device, torch.dtype]:
        teacher = self.distiller.teacher
        first = None if teacher is None else next((p for p in teacher.parameters() if p.is_floating_point()), None)
        if teacher is None or first is None:
            raise DataError("a cache of the teacher was asked for, and there is no teacher with weights")
        return teacher, first.device, first.dtype

    def _path(self, name: str, origin: str, view: int, s: int) -> Path:
        digest = hashlib.sha256(origin.encode()).hexdigest()
        item = re.sub(r"[^\w.-]", "-", name)
        return self.folder / f"{item}-{digest[:16]}" / f"view-{view + 1}" / f"{s:05}.safetensors"

    def _make_alone(self, items: dict[str, Item], origins: dict[str, str], view: int, s: int) -> bool:
        """Make a shard unless another process is making it or part of it. Locks are the system's: a dead process holds none."""
        locks = [self._path(name, origin, view, s).with_name(f".{s:05}.lock") for name, origin in sorted(origins.items())]
        with ExitStack() as held:
            try:
                for lock in locks:
                    lock.parent.mkdir(parents=True, exist_ok=True)
                    held.enter_context(hold(lock))
            except InUseError:
                return False
            self._make(items, origins, view, s)
            for lock in locks:  # who opened one before finds the shard when it looks
                lock.unlink(missing_ok=True)
        return True

    @torch.no_grad()
    def _make(self, items: dict[str, Item], origins: dict[str, str], view: int, s: int) -> None:
        _, device, dtype = self._teacher()
        lacking = {name: item for name, item in items.items() if self._open(name, origins[name], view, s) is None}
        packed: dict[str, list[dict[str, Tensor]]] = {name: [] for name in lacking}
        for batch in self.loader.of_view(view, torch.arange(s * SHARD, min((s + 1) * SHARD, len(self.loader.split)))):
            features = self.distiller._run_teacher(batch.x.to(device, dtype))
            if bad := [role for role, f in features.items() if not torch.isfinite(f).all()]:
                raise NonFiniteError(f"NaN or infinity in the teacher's {bad[0]!r}; check its weights and the data")
            for name, item in lacking.items():
                packed[name].append({key: rows.cpu() for key, rows in item.pack(features, batch.y.to(device)).items()})
        for name, parts in packed.items():
            tensors = _joined(parts)
            path, text = self._path(name, origins[name], view, s), _text(origins[name], view, s)
            # One entry: with several the header's order, and so the file's bytes, would differ from time to time.
            write_whole(path, save(tensors, metadata={"origin": f"{checksum(tensors, text)} {text}"}))

    def _opened(self, name: str, origins: dict[str, str], view: int, s: int) -> Shard:
        shard = self._open(name, origins[name], view, s)
        if shard is None:  # made by a process whose disk is not this one's, or damaged a moment ago
            self._make(self._items(), origins, view, s)
            shard = self._open(name, origins[name], view, s)
        if shard is None:
            raise DataError(f"{self._path(name, origins[name], view, s)} cannot be read back; check the disk")
        return shard

    def _open(self, name: str, origin: str, view: int, s: int) -> Shard | None:
        """A shard, mapped into memory, not read; None if it does not exist. A damaged or foreign one is removed."""
        path, text = self._path(name, origin, view, s), _text(origin, view, s)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no dict
            wrong = path not in self._sound and metadata.get("origin") != f"{checksum(tensors, text)} {text}"
        except (SafetensorError, OSError):
            tensors, wrong = {}, True
        if wrong:
            say(f"{path}: damaged, or made for something else; it is made again")
            path.unlink(missing_ok=True)
            return None
        self._sound.add(path)
        return Shard(tensors, min(SHARD, len(self.loader.split) - s * SHARD))


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    with torch.autocast("cpu", enabled=False):  # there it refuses to join what is of half precision
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _text(origin: str, view: int, s: int) -> str:
    return f"view {view} shard {s} of {origin}"
