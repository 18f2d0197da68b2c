"""A cache of the teacher's outputs for a few fixed views of every image, in memory-mapped shards on disk.

A loader with `views=V` shows every image in V fixed views, one per epoch in turn. The teacher's outputs on a view are the same every time,
so they are computed once, when the view is first shown, and then read from disk:

- p_T of a site (QUEST, letKD): for every pixel the labels above 1e-4 of its largest, scaled to sum to one; indices in 16 bits,
  probabilities in half precision (relative error at most 2^-11 above 6e-5; smaller ones are rounded to multiples of 6e-8). Sub-class
  labels are one row number per pixel, exact.
- logits and pooled features (KD, DKD, DIST, CRD, SRD): exact.
- methods that read whole maps of the teacher (AT, FitNet, SP, VID, FSP, AB, ReviewKD, SimKD), and MLKD, which needs two views per step,
  cannot use the cache and raise an error.

A shard depends only on teacher, data, view and settings, whose fingerprint is part of its folder's name, and not on the run, its seed, the
order of images or the number of processes. So runs can share shards, and a run gives the same numbers with new and with existing shards.
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
SHARD = 32 * EVAL_BATCH  # images per shard
WAIT_SECONDS = 0.2  # between checks of a shard that another run is computing


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

    @property
    def _predicted(self) -> bool:
        """Whether images without labels have the teacher's classes."""
        return self.predicts and self.fitting.part.unlabelled == "teacher"

    def pack(self, features: Mapping[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        supervision = self.fitting.part
        if self._predicted:
            y = torch.where(y < 0, features["logits"].argmax(dim=1), y)
        y = y.clamp_min(0)  # any class will do for images whose labels are never read
        return pack(supervision.labels(self.fitting.f_T(features), y))

    def unpack(self, packed: dict[str, Tensor], teacher: dict[str, Tensor], labels: dict[str, Labels]) -> None:
        labels[self.site] = unpack(packed, self.fitting.part)

    def origin(self, distiller: "Distiller") -> dict[str, Any]:
        supervision = self.fitting.part
        return {
            **({"unlabelled": "skip"} if supervision.reads_classes and not self._predicted else {}),
            "tap": distiller.tap_path(self.fitting.role),
            **(
                {"pooled": self.fitting.match.ratio}
                if self.fitting.match.size is None
                else {"resized": self.fitting.match.size}
            ),
            "supervision": {"kind": supervision.kind, **supervision.settings(), **supervision.label_settings(), "kept": KEPT},
            "fitted": checksum(
                {name: buffer for name, buffer in supervision.named_buffers() if name in supervision.fitted_buffers}
            ),
        }


Item = Vectors | PixelLabels


class Shard:
    """The cached outputs for consecutive images: each tensor contains the rows of all images, in order.

    Args:
        tensors: `count` (optional) is the number of rows per pixel in the other tensors; without it all images have equally many rows.
        n: number of images.
    """

    def __init__(self, tensors: dict[str, Tensor], n: int):
        self.tensors = tensors
        count = widen(tensors["count"]).view(n, -1).sum(dim=1) if "count" in tensors else None
        self._first: dict[str, Tensor] = {}  # first row of each image, and the end of the last
        for name, rows in tensors.items():
            size = torch.full((n,), len(rows) // n) if count is None or name == "count" else count
            self._first[name] = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(dim=0)])

    def image(self, i: int) -> dict[str, Tensor]:
        return {name: rows[self._first[name][i] : self._first[name][i + 1]] for name, rows in self.tensors.items()}


class TeacherCache:
    """Replaces the teacher for batches of a loader with fixed views; set it as `distiller.cache`.

    Args:
        distiller: fitted, on its device.
        loader: yields the training images, in `loader.views` fixed views.
        folder: of the shards; several runs can share it, also at the same time.

    Examples:
        >>> import tempfile, letkd
        >>> from letkd.data import CropFlip, Loader, Split
        >>> split = Split(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8) % 2)
        >>> loader = Loader(split, 4, mean=(0.5,) * 3, std=(0.25,) * 3, augment=CropFlip(), shuffle=True, views=2)
        >>> student, teacher = (letkd.create_model(name, num_classes=2) for name in ("resnet8_tiny", "resnet14_tiny"))
        >>> distiller = letkd.Distiller(student, teacher, letkd.methods.KD())
        >>> distiller.cache = TeacherCache(distiller, loader, tempfile.mkdtemp())
        >>> loader.set_epoch(1)
        >>> [list(distiller(batch).terms) for batch in loader]
        [['ce', 'kd'], ['ce', 'kd']]
    """

    def __init__(self, distiller: "Distiller", loader: Loader, folder: str | Path):
        if not loader.views:
            raise DataError("a cache of the teacher needs a loader with fixed views; pass Loader(views=10)")
        self.distiller, self.loader, self.folder = distiller, loader, Path(folder)
        self._shards: dict[str, list[Shard]] = {}
        self._ready: tuple[int, tuple[str, ...]] | None = None
        self._sound: set[Path] = set()  # files whose checksum has been verified
        self._reported: set[int] = set()

    def read(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Labels]]:
        """The teacher's outputs for a batch: features by role, labels by site. Missing views are computed first."""
        if batch.view is None or batch.index is None:
            raise DataError(
                "a cache of the teacher finds images by index and view, but the batch has none; use the cache's own loader"
            )
        items = self._items()
        if self._ready != (batch.view, tuple(items)):
            self.prepare(batch.view)
        teacher: dict[str, Tensor] = {}
        labels: dict[str, Labels] = {}
        index = (batch.index if batch.index_on_cpu is None else batch.index_on_cpu).tolist()
        for name, item in items.items():
            packed = _joined([self._shards[name][i // SHARD].image(i % SHARD) for i in index])
            item.unpack({key: rows.to(batch.x.device) for key, rows in packed.items()}, teacher, labels)
        return teacher, labels

    def prepare(self, view: int, check_stop: Callable[[], object] = lambda: None) -> None:
        """Compute the missing and damaged shards of a view, divided among all processes, and open them.

        Args:
            check_stop: called by all processes after each shard, and while they wait for another run's shard; it may raise an
                error to stop.
        """
        items, origins, began = self._items(), self._origins(), time.monotonic()
        n = -(-len(self.loader.split) // SHARD)
        lacking = {name: {s for s in range(n) if self._open(name, o, view, s) is None} for name, o in origins.items()}
        missing = from_first(sorted(set().union(*lacking.values())))
        mine, waited = missing[rank() :: world()], False
        names = [name for name in items if lacking[name]] or list(items)
        title = f"view {view + 1} of {self.loader.views}: {', '.join(names)} of the teacher"
        device = self._teacher()[1] if missing else None
        with bar(title, len(mine)) as tick:
            while missing and sum_of_all(torch.tensor([len(mine)], device=device)).item():
                made = next((s for s in mine if self._make_alone(items, origins, view, s)), None)
                if made is not None:
                    mine.remove(made)
                    tick()
                elif mine:
                    if not waited:
                        say(f"{title}: another run is computing it; waiting")
                    waited = True
                    time.sleep(WAIT_SECONDS)
                check_stop()
        wait_for_all()
        self._shards = {name: [self._opened(name, origins, view, s) for s in range(n)] for name in items}
        self._ready = view, tuple(items)
        if items and (missing or view not in self._reported):
            self._reported.add(view)
            paths = [self._path(name, origins[name], view, s) for name in names for s in range(n)]
            size = sum(path.stat().st_size for path in paths) / 1e6
            took = f"computed in {time.monotonic() - began:.0f} s" if missing else "found"
            say(f"{title}: {took}, {len(self.loader.split):,} images, {size:,.1f} MB in {self.folder}")

    def _items(self) -> dict[str, Item]:
        lessons = self.distiller.lessons()
        items: dict[str, Item] = {role: Vectors(role) for role in lessons.vectors}
        same = self.distiller.same_classes
        return items | {f"p_T at {site}": PixelLabels(site, fitting, same) for site, fitting in lessons.labels.items()}

    def _origins(self) -> dict[str, str]:
        """Everything that an item's shards depend on, by item, as text."""
        teacher, _, dtype = self._teacher()
        loader = self.loader
        shared = {
            "format": f"{FORMAT}, {SHARD} images a shard, {eval_batch(loader.split.image_size)} at a time, views {VIEWS}",
            "teacher": f"{type(teacher).__name__} {fingerprint(teacher)} in {torch.bfloat16 if self.distiller.bf16_teacher else dtype}",
            "images": f"{loader.split.fingerprint()} mean {list(loader.mean)} std {list(loader.std)}",
            "augment": f"{type(loader.augment).__name__} {vars(loader.augment)}",
        }
        if self.distiller.teacher_input is not None:
            shared |= {"teacher's input": str(different)} if (different := self.distiller.teacher_input.differences()) else {}
        return {
            name: json.dumps({**shared, "item": name, **item.origin(self.distiller)}, sort_keys=True)
            for name, item in self._items().items()
        }

    def _teacher(self) -> tuple[torch.nn.Module, torch.device, torch.dtype]:
        teacher = self.distiller.teacher
        first = None if teacher is None else next((p for p in teacher.parameters() if p.is_floating_point()), None)
        if teacher is None or first is None:
            raise DataError("a cache of the teacher needs a teacher with weights, but there is none")
        return teacher, first.device, first.dtype

    def _path(self, name: str, origin: str, view: int, s: int) -> Path:
        digest = hashlib.sha256(origin.encode()).hexdigest()
        item = re.sub(r"[^\w.-]", "-", name)
        return self.folder / f"{item}-{digest[:16]}" / f"view-{view + 1}" / f"{s:05}.safetensors"

    def _make_alone(self, items: dict[str, Item], origins: dict[str, str], view: int, s: int) -> bool:
        """Compute a shard unless another process is computing it. The system releases the locks of dead processes."""
        locks = [self._path(name, origin, view, s).with_name(f".{s:05}.lock") for name, origin in sorted(origins.items())]
        with ExitStack() as locked:
            try:
                for lock in locks:
                    lock.parent.mkdir(parents=True, exist_ok=True)
                    locked.enter_context(hold(lock))
            except InUseError:
                return False
            self._make(items, origins, view, s)
            for lock in locks:  # a process that is waiting for a lock then finds the shard
                lock.unlink(missing_ok=True)
        return True

    @torch.no_grad()
    def _make(self, items: dict[str, Item], origins: dict[str, str], view: int, s: int) -> None:
        _, device, dtype = self._teacher()
        lacking = {name: item for name, item in items.items() if self._open(name, origins[name], view, s) is None}
        if not lacking:  # another process has computed them in the meantime
            return
        packed: dict[str, list[dict[str, Tensor]]] = {name: [] for name in lacking}
        for batch in self.loader.of_view(view, torch.arange(s * SHARD, min((s + 1) * SHARD, len(self.loader.split)))):
            features = self.distiller.run_teacher(batch.x.to(device, dtype))
            if bad := [role for role, f in features.items() if not torch.isfinite(f).all()]:
                raise NonFiniteError(f"NaN or infinity in the teacher's {bad[0]!r}; check its weights and the data")
            for name, item in lacking.items():
                with torch.autocast(device.type, enabled=False):  # runs of any precision share the shards
                    rows = item.pack(features, batch.y.to(device))
                packed[name].append({key: row.cpu() for key, row in rows.items()})
        for name, parts in packed.items():
            tensors = _joined(parts)
            path, text = self._path(name, origins[name], view, s), _text(origins[name], view, s)
            # One entry only: with several, their order in the header, and so the file's bytes, would vary.
            write_whole(path, save(tensors, metadata={"origin": f"{checksum(tensors, text)} {text}"}))

    def _opened(self, name: str, origins: dict[str, str], view: int, s: int) -> Shard:
        shard = self._open(name, origins[name], view, s)
        if shard is None:  # computed by a process with another disk, or just damaged
            self._make(self._items(), origins, view, s)
            shard = self._open(name, origins[name], view, s)
        if shard is None:
            raise DataError(f"{self._path(name, origins[name], view, s)} cannot be read after it was written; check the disk")
        return shard

    def _open(self, name: str, origin: str, view: int, s: int) -> Shard | None:
        """A shard, memory-mapped; None if it does not exist. A damaged shard, or one with another fingerprint, is removed."""
        path, text = self._path(name, origin, view, s), _text(origin, view, s)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is not a dict
            wrong = path not in self._sound and metadata.get("origin") != f"{checksum(tensors, text)} {text}"
        except (SafetensorError, OSError):
            tensors, wrong = {}, True
        if wrong:
            say(f"{path}: damaged, or for other inputs; computing it again")
            path.unlink(missing_ok=True)
            return None
        self._sound.add(path)
        return Shard(tensors, min(SHARD, len(self.loader.split) - s * SHARD))


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    with torch.autocast("cpu", enabled=False):  # autocast on a CPU cannot concatenate half-precision tensors
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _text(origin: str, view: int, s: int) -> str:
    return f"view {view} shard {s} of {origin}"
