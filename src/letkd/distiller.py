"""Distiller: a student, a frozen teacher and methods make one loss."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.errors import DataError, LetkdError, NonFiniteError, TapError, nearest
from letkd.methods.base import Fitting, Lessons, Method, Side, View, need_equal_classes
from letkd.processes import from_first, objects_of_all, rank, several
from letkd.progress import bar, say, track
from letkd.supervision import Supervision
from letkd.supervision.artefacts import Origin, load_fitted, save_fitted
from letkd.supervision.labels import Labels
from letkd.taps import Tap, Taps, as_logits, check_model, run_once

if TYPE_CHECKING:
    from letkd.cache import TeacherCache

__all__ = ["Batch", "Distiller", "Step"]


@dataclass
class Step:
    """What one forward gives: the weighted loss, the unweighted terms by name, and the student's logits."""

    loss: Tensor
    terms: dict[str, Tensor]
    logits: Tensor


class Distiller(nn.Module):
    """Student, teacher and methods as one module: `forward(batch) -> Step`.

        L(θ_s) = L_CE + Σ λ L_KD                                                                     (3.2)

    Args:
        student: any `nn.Module` that maps images to logits. Methods may graft layers into it, in place.
        teacher: likewise; put in eval mode, its parameters frozen, kept out of `state_dict()` and `parameters()`. None for plain CE.
        methods: one method or a list of them; none for plain CE.
        weights: λ by term name, 1 where not named. `ce` is the cross-entropy.
        student_taps, teacher_taps: role -> module path (or `Tap`), for models that carry no table or to overrule it.
        example: one input `[1 3 H W]`, to find the shapes at the taps. Zoo models know their own.
        images: number of training images; a supervision with K = "auto" needs it.
        fused: run KD layers and per-pixel losses over chunks of pixels (`letkd.fused`): equal within rounding, a fraction of the time
            and memory. With False they are computed as the paper writes them.
        checks: look at every step's labels and loss and stop at the first that is wrong.

    The teacher is not trained, nor are its BN statistics touched; `.to()` moves it along.

    Examples:
        >>> import letkd
        >>> teacher = letkd.create_model("resnet14_tiny", num_classes=3)
        >>> student = letkd.create_model("resnet8_tiny", num_classes=3)
        >>> batch = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> distiller = Distiller(student, teacher, letkd.methods.letkd1(K=16)).fit([batch])
        >>> step = distiller(batch)
        >>> list(step.terms)
        ['ce', 'kd/penultimate']
        >>> step.loss.backward()
        >>> distiller.export()(batch[0]).shape  # the student alone
        torch.Size([6, 3])
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None = None,
        methods: Method | Sequence[Method] = (),
        *,
        weights: Mapping[str, float] | None = None,
        student_taps: Mapping[str, Tap | str] | None = None,
        teacher_taps: Mapping[str, Tap | str] | None = None,
        example: Tensor | None = None,
        images: int | None = None,
        fused: bool = True,
        checks: bool = True,
    ):
        super().__init__()
        methods = [methods] if isinstance(methods, Method) else list(methods)
        if methods and teacher is None:
            raise LetkdError(f"{', '.join(m.name for m in methods)} needs a teacher and none was given")
        if teacher is student:
            raise LetkdError("student and teacher are the same object; make a copy of one, or the teacher would be trained")
        self.student = student
        self.methods = nn.ModuleList(methods)
        self.checks = checks
        self.cache: TeacherCache | None = None  # where it is set, steps read what they need of the teacher from it
        for method in methods:
            method.fused, method.images = fused, images
        # In a tuple, so that nn.Module does not see the teacher: no parameters, no state, no train().
        self._frozen: tuple[nn.Module, ...] = ()
        self._student_reads, self._teacher_reads = Taps(student, {}), None
        if teacher is not None:
            check_model(teacher, hooks=False)
            self._frozen = (teacher.eval().requires_grad_(False),)
            self._build(methods, teacher, student_taps, teacher_taps, example, weights or {})
        else:
            self.set_weights(weights or {})
            if example is not None:
                output, _ = run_once(self._student_reads, example.to(_device(student)))
                as_logits(output, student)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise LetkdError(f"the student {type(student).__name__} has no parameter that can be trained; give one that has")

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """λ by term name, 1 where not named. A method whose terms all weigh 0 is left out of the step."""
        names = ["ce", *(name for method in self._methods() for name in method.term_names())]
        unknown = [f"{name!r} (nearest: {nearest(name, names)})" for name in weights if name not in names]
        if unknown:
            raise LetkdError(f"there is a weight for {', '.join(unknown)}, and the terms are {', '.join(names)}")
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise LetkdError(f"two methods give the term {twice[0]!r}, and only one of them would count; drop one")
        self.weights = {name: float(weights.get(name, 1.0)) for name in names}
        if not any(self.weights.values()):
            raise LetkdError(f"all terms ({', '.join(names)}) weigh 0; there is nothing to learn from")
        self._active = [method for method in self._methods() if any(self.weights[name] for name in method.term_names())]

    def _build(
        self,
        methods: list[Method],
        teacher: nn.Module,
        student_taps: Mapping[str, Tap | str] | None,
        teacher_taps: Mapping[str, Tap | str] | None,
        example: Tensor | None,
        weights: Mapping[str, float],
    ) -> None:
        if example is None:
            example = _example_for(self.student, teacher)
        here = Side(self.student, student_taps, example.to(_device(self.student)), who="student")
        there = Side(teacher, teacher_taps, example.to(_device(teacher)), who="teacher")
        need_equal_classes(here, there)
        try:
            for method in methods:
                method.build(here, there)
            sites = Counter(site for method in methods for site in method.fittings())
            if twice := [site for site, n in sites.items() if n > 1]:
                raise LetkdError(
                    f"two methods have a site at {twice[0]!r}; name the place by another role for one of them, or drop it"
                )
            # Graft first, tap second: taps may lie inside what was grafted.
            reads = [method.reads for method in methods]
            self._student_reads = Taps(self.student, {role: tap for read in reads for role, tap in read.student.items()})
            self._teacher_reads = Taps(teacher, {role: tap for read in reads for role, tap in read.teacher.items()})
            self.set_weights(weights)
            # Whatever cannot run together shows here, not in the first step of somebody's training.
            run_once(self._student_reads, example.to(_device(self.student)))
            run_once(self._teacher_reads, example.to(_device(teacher)))
        except BaseException:
            for layer in reversed(here.grafts):
                layer.remove()
            raise

    @property
    def teacher(self) -> nn.Module | None:
        return self._frozen[0] if self._frozen else None

    @property
    def student_reads(self) -> dict[str, Tap]:
        """Where the methods read the student, by role."""
        return self._student_reads.taps

    def forward(self, batch: Any) -> Step:
        batch = Batch.of(batch)
        output, student = self._student_reads(batch.x)  # Alg. 3: F ← f_s(X; θ_s), F̂ goes on to the logits
        logits = student["logits"] = as_logits(output, self.student)
        if self.checks:
            _check_labels(batch.y, logits.shape[1])
        view = View(batch, student, *self._taught(batch))  # Alg. 1, online; Alg. 2, online: F ← f_t(X; θ_t)
        terms = {"ce": F.cross_entropy(logits, batch.y)}  # (3.2): L_CE
        for method in self._active:
            terms |= method.terms(view)
        # A term of weight 0 is left out, not multiplied by 0: what only it reaches then has no gradient and is not decayed.
        loss = torch.stack([self.weights[name] * term for name, term in terms.items() if self.weights[name]]).sum()  # (3.2)
        # Labels that are looked up hide the teacher's NaN from the loss, so its features are looked at too.
        if self.checks and not _all_finite([loss, *view.teacher.values()]):
            raise NonFiniteError(_first_non_finite(view, terms))
        return Step(loss, terms, logits)

    def _methods(self) -> list[Method]:
        return [method for method in self.methods if isinstance(method, Method)]

    def _taught(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Labels]]:
        """The teacher's features by role and, where a cache has them, its labels by site."""
        if not self._active:
            return {}, {}
        return (self._teach(batch.x), {}) if self.cache is None else self.cache.read(batch)

    @torch.no_grad()
    def _teach(self, x: Tensor) -> dict[str, Tensor]:
        if self._teacher_reads is None:
            return {}
        teacher = self._frozen[0].eval()
        with torch.autocast(x.device.type, enabled=False):  # in bf16 many a pixel would fall to another centre
            output, features = self._teacher_reads(x)
            return {**features, "logits": as_logits(output, teacher)}

    def lessons(self) -> Lessons:
        """What a cache must keep of the teacher for the methods that take part in the step."""
        if maps := [method.name for method in self._methods() if method.lessons() is None]:
            raise LetkdError(
                f"a cache of the teacher keeps labels, logits and pooled features, and {', '.join(map(repr, maps))} needs whole maps; "
                "train without it (leave out --cache, train.cache_views)"
            )
        parts = [lessons for method in self._active if (lessons := method.lessons()) is not None]
        vectors = dict.fromkeys(role for part in parts for role in part.vectors)
        return Lessons(tuple(vectors), {site: fitting for part in parts for site, fitting in part.labels.items()})

    def place(self, role: str) -> str:
        """Where in the teacher a role's features are read."""
        if self._teacher_reads is None:
            raise TapError("there is no teacher to read from")
        tap = self._teacher_reads.taps.get(role)
        return "output" if tap is None else f"{tap.path} {tap.io}"

    def fittings(self) -> dict[str, Fitting]:
        """The offline parts of all methods, by site."""
        return {site: fitting for method in self._methods() for site, fitting in method.fittings().items()}

    def fit(
        self,
        loader: Iterable,
        *,
        folder: str | Path | None = None,
        data: str = "",
        force: bool = False,
        terms: Collection[str] | None = None,
    ) -> Self:
        """Run the offline parts (Alg. 1 and 2): one pass of the teacher over `loader`, without augmentation for the paper's way.

        Of several processes each passes over its own part of the images; what they gathered is brought together, and all end
        with the same labels as one process that saw everything.

        Args:
            loader: yields batches as for `forward`.
            folder: where fitted supervisions are kept. One whose fingerprint (teacher weights, tap, data, settings) matches is
                loaded instead of fitted; one that does not is fitted anew, and a line says what changed.
            data: names the data for that fingerprint; needed with `folder`.
            force: fit even so.
            terms: fit only what these loss terms need; all where not given.
        """
        unfitted = {
            site: part
            for site, part in self.fittings().items()
            if part.supervision.fitted_buffers and (terms is None or part.term in terms)
        }
        if folder is not None and not data:
            raise LetkdError("fit(folder=…) must know which data the fitted files belong to: pass data='a name or hash of it'")
        origins = {site: self._origin(part, data) for site, part in unfitted.items()} if folder is not None else {}
        if folder is not None and not force:
            for site, part in list(unfitted.items()):
                if all(objects_of_all(load_fitted(part.supervision, Path(folder), site, origins[site]))):
                    del unfitted[site]
        if unfitted:
            self._fit(unfitted, loader)
            for site in unfitted if folder is not None and rank() == 0 else ():
                save_fitted(unfitted[site].supervision, Path(folder or ""), site, origins[site])
        return self

    @torch.no_grad()
    def _fit(self, unfitted: dict[str, Fitting], loader: Iterable) -> None:
        for part in unfitted.values():
            part.supervision.reset()
        device = _device(self._frozen[0])
        for item in track(loader, f"fitting {', '.join(unfitted)}"):
            batch = Batch.of(item).to(device)
            if not len(batch.y):
                continue  # this process's share of a batch with fewer images than processes
            if self.checks:
                _check_labels(batch.y, None)
            features = self._teach(batch.x)  # Alg. 1, offline; Alg. 2, offline: F ← f_t(X; θ_t)
            for part in unfitted.values():
                part.supervision.partial_fit(part.f_T(features), batch.y, batch.index)
        for site, part in unfitted.items():
            with bar(f"{part.supervision} at {site}: from pixels to labels", None):
                _finish(part.supervision)
            part.supervision.to(device)
            facts = (
                f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in part.supervision.report_.items()
            )
            say(f"fitted {part.supervision} at {site} ({', '.join(facts)})")

    def _origin(self, part: Fitting, data: str) -> Origin:
        where = f"{self.place(part.role)} pooled {part.ratio[0]}x{part.ratio[1]}"
        return Origin.of(self._frozen[0], where, data, part.supervision)

    def export(self) -> nn.Module:
        """The student alone, in eval mode: with the layers that a method put into it, without teacher, taps or gradients."""
        student = copy.deepcopy(self.student)
        for method in self._methods():
            student = method.export(student)
        for parameter in student.parameters():
            parameter.grad = None
        return student.eval()

    def train(self, mode: bool = True) -> Self:
        """As for any module, but a batch norm whose own parameters are all frozen stays in eval mode: its statistics are frozen, too."""
        super().train(mode)
        for module in self.student.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(p.requires_grad for p in own):
                module.eval()
        return self

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        for teacher in self._frozen:
            teacher._apply(fn)
        return self


def _finish(supervision: Supervision) -> None:
    """From pixels to labels: by the first process, for all of them."""
    if not several():
        return supervision.finish()
    supervision.gather()
    fitted: Any = None
    if rank() == 0:
        try:
            supervision.finish()
            fitted = {name: getattr(supervision, name) for name in supervision.fitted_buffers}
        except LetkdError as error:
            fitted = error
    fitted, supervision.report_ = from_first((fitted, supervision.report_))
    if isinstance(fitted, LetkdError):
        raise fitted
    supervision.reset()  # in the first process, too: all end in the same state, down to what is worked out later
    for name, value in fitted.items():
        setattr(supervision, name, value)
    return None


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _example_for(*models: nn.Module) -> Tensor:
    sizes = [getattr(model, "input_size", None) for model in models]
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        names = " and ".join(type(model).__name__ for model in models)
        raise TapError(
            f"{names} do not say what they take: pass example=one input [1 3 H W], so that the shapes at the taps can be found"
        )
    return torch.zeros(1, *size)


def _check_labels(y: Tensor, C: int | None) -> None:
    if len(y) and (int(y.min()) < 0 or (C is not None and int(y.max()) >= C)):
        wrong = int(y.min()) if int(y.min()) < 0 else int(y.max())
        raise DataError(f"a label is {wrong}, and with {C or 'C'} classes labels run from 0 to {C - 1 if C else 'C - 1'}")


def _all_finite(values: Iterable[Tensor]) -> bool:
    return bool(torch.stack([torch.isfinite(value).all() for value in values]).all())


def _first_non_finite(view: View, terms: Mapping[str, Tensor]) -> str:
    places = [(f"the input batch of epoch {view.batch.epoch}", view.batch.x)]
    places += [(f"the teacher's tap {role!r}", f) for role, f in view.teacher.items()]
    places += [(f"the student's tap {role!r}", f) for role, f in view.student.items()]
    places += [(f"the loss term {name!r}", term) for name, term in terms.items()]
    where = next((name for name, value in places if not torch.isfinite(value).all()), "the weighted loss")
    bad = ", ".join(f"{name}={term.item():g}" for name, term in terms.items())
    return f"NaN or infinity in {where} (terms: {bad}); stopped before it reached the weights. Lower the learning rate or check the data"
