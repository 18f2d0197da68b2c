"""Distiller: the loss of a student, a frozen teacher and methods."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from letkd.batch import Batch, all_labelled, channels_of, example_for
from letkd.distiller.finite import all_finite, where_non_finite
from letkd.distiller.lessons import combined_lessons
from letkd.distiller.offline import fit_in_folder, fit_parts
from letkd.distiller.step import Step
from letkd.distiller.task import Criterion, Task, class_terms, method_terms, task_terms
from letkd.distiller.teacher_input import TeacherInput
from letkd.distiller.weights import AutoWeights, Weight, check_weights, nothing_to_learn
from letkd.errors import DataError, LetkdError, NonFiniteError, TapError, UnsupportedPair
from letkd.methods.base import Fitting, Lessons, Method, Reads, Side, View, need_equal_classes, need_own_parameters, need_unused
from letkd.modules import copied
from letkd.progress import track
from letkd.supervision.artefacts import Origin
from letkd.supervision.labels import Labels
from letkd.taps import Tap, Taps, as_logits, check_model, run_once
from letkd.taps.outputs import logits_in
from letkd.taps.reach import Reach

if TYPE_CHECKING:
    from letkd.distiller.cache import TeacherCache

__all__ = ["Batch", "Distiller", "Step"]


class Distiller(nn.Module):
    """Student, teacher and methods as one module: `forward(batch) -> Step`.

        L(θ_s) = L_CE + Σ λ L_KD                                                                     (3.2)

    Args:
        student: any `nn.Module` that maps images to logits. Methods may graft layers into it, in place.
        teacher: the same; set to eval mode and frozen; not part of `state_dict()` and `parameters()`. None for plain cross-entropy.
        methods: one method or a list of methods; empty for plain cross-entropy.
        weights: λ by term name; default: 1. `ce` is the cross-entropy; a task names its own terms. `"auto"` sets the weight of a
            method's term from gradients in the first steps (`AutoWeights`), `"auto:0.5"` half of that.
        student_taps, teacher_taps: module path (or `Tap`) by role, for models without a role table or to override it.
        teacher_input: the teacher's own input (`letkd.TeacherInput`), if it was trained with another normalisation or image size, or
            with another order of classes. Applied in every step, in `fit` and in the cache.
        bf16_teacher: run the teacher in bf16 (autocast), except in `fit`.
        example: an input `[1 3 H W]`, to find the shapes at the taps. Not needed for zoo models.
        criterion: `criterion(logits, y) -> scalar`, replaces the cross-entropy; its term is still called `ce`. For mixed images it is
            called with each of the two labels and weighted by their shares, so it only needs to handle class indices. It gets only
            images with a label; if there are none, it gets all images with class 0, and its value is multiplied by 0. If it is a
            module, its parameters are trained.
        task: `task(output, batch) -> {name: term}`, replaces the criterion and its term `ce`, for students that do not classify.
            `output` is the student's output, of any type and shape; `batch.target` is what the loader yields with the images. If it
            is a module, its parameters are trained. The teacher, too, may return anything, unless a method reads logits.
        images: number of training images; needed by a supervision with K = "auto".
        fused: compute KD layers and per-pixel losses in chunks of pixels (`letkd.layer.fused`), in a fraction of the time and memory.
            The layer is equal within rounding; the loss of K-means labels also drops labels below `least` (1e-7) of a pixel's
            largest, which changes the KL by less than 1e-4 (measured; docs/deviations.md, D48). False: as the paper defines them.
        checks: check label values and the loss in every step, which synchronises with the device, and raise an error if they are
            wrong. Shapes and types are always checked.

    Neither the teacher nor its BN statistics change; `.to()` moves the teacher, too.

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
        weights: Mapping[str, Weight] | None = None,
        student_taps: Mapping[str, Tap | str] | None = None,
        teacher_taps: Mapping[str, Tap | str] | None = None,
        teacher_input: TeacherInput | None = None,
        bf16_teacher: bool = False,
        example: Tensor | None = None,
        criterion: Criterion | None = None,
        task: Task | None = None,
        images: int | None = None,
        fused: bool = True,
        checks: bool = True,
    ):
        super().__init__()
        methods = [methods] if isinstance(methods, Method) else list(methods)
        if methods and teacher is None:
            raise LetkdError(f"{', '.join(m.name for m in methods)} needs a teacher, but none was given")
        if teacher is student:
            raise LetkdError("student and teacher are the same object, so the teacher would be trained; copy one of them")
        self.student = student
        self.methods = nn.ModuleList(methods)
        if task is not None and criterion is not None:
            raise LetkdError("a criterion and a task were given, but each replaces the cross-entropy; give only one")
        self.criterion, self.task = criterion or F.cross_entropy, task
        self.same_classes = True  # whether the teacher predicts the student's classes
        self.checks = checks
        self.teacher_input, self.bf16_teacher = teacher_input, bf16_teacher
        known = channels_of(student) or channels_of(teacher) if example is None else example.shape[1:2].numel()
        self._channels: int | None = known  # of the images
        self._reach = Reach()
        self.auto: AutoWeights | None = None  # if weights are automatic
        self.cache: TeacherCache | None = None  # if set, steps read the teacher's outputs from it
        for method in methods:
            method.fused, method.images = fused, images
        # In a tuple, so that nn.Module does not register the teacher: no parameters, no state, no train().
        self._frozen: tuple[nn.Module, ...] = ()
        self._student_reads, self._teacher_reads = Taps(student, {}), None
        if teacher is not None:
            check_model(teacher, hooks=False)
            need_own_parameters(student, teacher)
            self._frozen = (teacher.eval().requires_grad_(False),)
            self._build(methods, teacher, student_taps, teacher_taps, example, weights or {})
        else:
            self.set_weights(weights or {})
            if example is not None:
                output, _ = run_once(self._student_reads, example.to(_device(student)))
                self._logits(output, student)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise LetkdError(
                f"the student {type(student).__name__} has no trainable parameters; use one that has, or unfreeze some"
            )

    def set_weights(self, weights: Mapping[str, Weight]) -> None:
        """Set λ by term name; default: 1. A method whose terms all have weight 0 is left out of the step."""
        places = {name: method.measured_at(name) for method in self._methods() for name in method.term_names()}
        names = [name for method in self._methods() for name in method.term_names()]  # with duplicates
        # The names of a task's terms are known only after it has run.
        own = ["ce"] if self.task is None else [name for name in weights if name not in names]
        warmup = {name: method.warmup for method in self._methods() for name in method.term_names()}
        self.weights = check_weights(weights, [*own, *names], own=own, warmup=warmup)
        self.auto = AutoWeights.of(self.weights, places, self.auto)
        if self.task is None and not any(self.weights.values()):
            raise nothing_to_learn(self.weights)
        self._unused = frozenset(name for name, weight in self.weights.items() if not weight)
        self._active = [method for method in self._methods() if not self._unused.issuperset(method.term_names())]

    def auto_weights(self) -> dict[str, float]:
        """The values of automatic weights by term; waits for the device."""
        return {} if self.auto is None else self.auto.as_numbers(self.weights)

    def _build(
        self,
        methods: list[Method],
        teacher: nn.Module,
        student_taps: Mapping[str, Tap | str] | None,
        teacher_taps: Mapping[str, Tap | str] | None,
        example: Tensor | None,
        weights: Mapping[str, Weight],
    ) -> None:
        if example is None:
            example = example_for(self.student, teacher)
        dense = self.task is not None
        here = Side(self.student, student_taps, example.to(_device(self.student)), who="student", dense=dense)
        shown = example if self.teacher_input is None else self.teacher_input(example)
        order = None if self.teacher_input is None else self.teacher_input.order
        there = Side(teacher, teacher_taps, shown.to(_device(teacher)), who="teacher", order=order, dense=dense)
        foreign = "" if self.teacher_input is None else self.teacher_input.foreign
        need_equal_classes(here, there, methods, foreign)
        self.same_classes = not foreign and here.has_logits and there.has_logits and here.num_classes == there.num_classes
        need_unused(methods)
        try:
            for method in methods:
                method.reads = Reads()  # not those of a pair that was refused
                method.build(here, there)
                method.to(_device(self.student))
            sites = Counter(site for method in methods for site in method.fittings())
            if twice := [site for site, n in sites.items() if n > 1]:
                raise LetkdError(f"two methods have a site at {twice[0]!r}; give one of them another role, or remove it")
            # Graft first, then tap: taps may be inside grafted layers.
            reads = [method.reads for method in methods]
            self._student_reads = Taps(self.student, {role: tap for read in reads for role, tap in read.student.items()})
            self._teacher_reads = Taps(teacher, {role: tap for read in reads for role, tap in read.teacher.items()})
            self.set_weights(weights)
            # A combination that cannot run fails here, not in the first training step.
            run_once(self._student_reads, example.to(_device(self.student)))
            run_once(self._teacher_reads, shown.to(_device(teacher)))
            for method in methods:
                method.is_built = True
        except BaseException:
            for layer in reversed(here.grafts):
                layer.remove()
            raise

    @property
    def teacher(self) -> nn.Module | None:
        return self._frozen[0] if self._frozen else None

    @property
    def student_reads(self) -> dict[str, Tap]:
        """The student's taps that the methods read, by role."""
        return self._student_reads.taps

    def forward(self, batch: Any) -> Step:
        batch = Batch.of(batch, channels=self._channels, task=self.task is not None)
        if not len(batch.x):
            raise DataError("the batch has no images; leave out empty batches")
        with self._reach.watch(self.student, self._trained_layers()) as grafted:
            output, student = self._student_reads(batch.x)  # Alg. 3: F ← f_s(X; θ_s), and F̂ on to the logits
        logits = self._logits(output, self.student)
        if logits is not None:
            student["logits"] = logits
        if batch.y2 is not None:
            self.check_mix()
        if self._checks_labels():
            batch.all_labelled = all_labelled(batch, None if logits is None else logits.shape[1])
        # Alg. 1, online; Alg. 2, online: F ← f_t(X; θ_t)
        view = View(batch, student, *self._read_teacher(batch), same_classes=self.same_classes, unused=self._unused)
        if any(method.two_views for method in self._active):
            view.second = self._second(batch)
        terms = dict(own := self._own_terms(output, logits, batch))  # (3.2): L_CE
        for method in self._active:
            terms |= method_terms(method, view, learning=self.checks and self.training and self.auto is None)
        weights = self.weights if self.auto is None else self.auto.weigh(self.weights, own, terms, student, checks=self.checks)
        # A term of weight 0 is left out, not multiplied by 0: parameters that only it depends on get no gradient and no decay.
        weighted = [weights.get(name, 1.0) * term for name, term in terms.items() if self.weights.get(name, 1.0)]
        if not weighted:
            raise nothing_to_learn(terms)
        loss = torch.stack(weighted).sum()  # (3.2)
        # With labels from a table, NaN in the teacher's features would not reach the loss, so the features are checked, too.
        finite = all_finite([loss.detach(), *view.teacher.values()])
        if self.checks and not finite:
            raise NonFiniteError(where_non_finite(view, terms))
        self._reach.prove(self.student, loss, grafted)
        return Step(loss, terms, output if logits is None else logits, finite)

    def _logits(self, output: Any, model: nn.Module) -> Tensor | None:
        """A network's logits `[b C]`; None if it returns something else and there is a task, which need not classify."""
        return as_logits(output, model) if self.task is None or logits_in(output) is not None else None

    def _own_terms(self, output: Any, logits: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        if self.task is None:
            return class_terms(self.criterion, logits, batch)
        taken = {name for method in self._methods() for name in method.term_names()}
        return task_terms(self.task, output, batch, weights=self.weights, taken=taken)

    def _checks_labels(self) -> bool:
        """Whether labels must be classes; the integers of a task need not be, unless a method reads them."""
        return self.checks and (self.task is None or any(method.why_labels() for method in self._active))

    def _trained_layers(self) -> list[str]:
        """Paths of the grafted layers that this step must train."""
        if (
            not (self.checks and self.training and torch.is_grad_enabled() and self.weights.get("ce", self.task is not None))
            or torch.compiler.is_compiling()
        ):
            return []
        return [path for method in self._active for path, term in method.grafted().items() if self.weights[term]]

    def _methods(self) -> list[Method]:
        return [method for method in self.methods if isinstance(method, Method)]

    def _read_teacher(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Labels]]:
        """The teacher's features by role and, with a cache, its labels by site."""
        if not self._active:
            return {}, {}
        return (self.run_teacher(batch.x), {}) if self.cache is None else self.cache.read(batch)

    def _second(self, batch: Batch) -> View:
        """Both networks on the second view of the images, in a separate pass: BN does not mix the views."""
        if batch.second is None:
            names = ", ".join(repr(method.name) for method in self._active if method.two_views)
            raise DataError(
                f"{names} compares two views of every image, but the batch has only one; set data.second_view, or yield "
                "letkd.Batch(x, y, second=…)"
            )
        output, student = self._student_reads(batch.second)
        student["logits"] = as_logits(output, self.student)
        shown = replace(batch, x=batch.second, second=None)
        return View(shown, student, self.run_teacher(batch.second), same_classes=self.same_classes, unused=self._unused)

    @torch.no_grad()
    def run_teacher(self, x: Tensor, *, bf16: bool | None = None) -> dict[str, Tensor]:
        """The teacher's features by role, in the type of the images and not in that of the step; `bf16` overrides `bf16_teacher`."""
        if self._teacher_reads is None:
            return {}
        self._frozen[0].eval()
        adapt, low = self.teacher_input, self.bf16_teacher if bf16 is None else bf16
        with torch.autocast(x.device.type, enabled=False):
            shown = x if adapt is None else adapt(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
            output, features = self._teacher_reads(shown)
        logits = logits_in(output)  # None for a backbone; its methods do not read logits
        if logits is not None:
            features = {**features, "logits": logits if adapt is None else adapt.reorder(logits)}
        return {role: f.to(x.dtype) for role, f in features.items()}

    def check_mix(self) -> None:
        """Raise an error if a method cannot learn from mixed images (`letkd.data.Mix`)."""
        for method in self._methods():
            if method.unmixable:
                raise UnsupportedPair(f"{method.name} cannot learn from mixed images: {method.unmixable}; set data.mix=none")

    def lessons(self) -> Lessons:
        """What a cache must store for the methods and sites that are part of the step."""
        return combined_lessons(self._methods(), self._active, self._unused)

    def tap_path(self, role: str) -> str:
        """Module path and side where a role's features are read in the teacher."""
        if self._teacher_reads is None:
            raise TapError("there is no teacher to read from")
        tap = self._teacher_reads.taps.get(role)
        layout = self._teacher_reads.layouts.get(role)
        return "output" if tap is None else f"{tap.path} {tap.io}{'' if layout is None else f' {layout}'}"

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
        """Run the offline parts (Alg. 1 and 2): one pass of the teacher over `loader`, which in the paper is not augmented.

        With several processes, each gets its own part of the images. Their results are combined, so all processes have the same labels
        as a single process that gets all images.

        Args:
            loader: yields the same kinds of batches as for `forward`.
            folder: for fitted supervisions. If a file's fingerprint (teacher weights, tap, data, settings) matches, it is loaded
                instead of fitted; otherwise it is refitted, and a message says what changed. Runs that share the folder and start
                together fit once: the others wait.
            data: a name for the data, part of the fingerprint; required with `folder`.
            force: fit even if a matching file exists.
            terms: fit only what these loss terms need; default: all terms.
        """
        unfitted = {
            site: fitting
            for site, fitting in self.fittings().items()
            if fitting.part.fitted_buffers and (terms is None or fitting.term in terms)
        }
        if folder is not None and not data:
            raise LetkdError("fit(folder=…) needs a name for the data, which is stored in the files; pass data='name or hash'")
        if folder is not None:
            origins = {site: self._origin(fitting, data) for site, fitting in unfitted.items()}
            fit_in_folder(unfitted, Path(folder), origins, partial(self._fit, loader=loader), force=force)
        elif unfitted:
            self._fit(unfitted, loader)
        return self

    @torch.no_grad()
    def _fit(self, unfitted: Mapping[str, Fitting], loader: Iterable) -> None:
        device = _device(self._frozen[0])
        items = track(loader, f"fitting {', '.join(unfitted)}")
        batches = (Batch.of(item, channels=self._channels, task=self.task is not None).to(device) for item in items)
        fit_parts(unfitted, batches, partial(self.run_teacher, bf16=False), device=device, checks=self._checks_labels())

    def _origin(self, fitting: Fitting, data: str) -> Origin:
        where = f"{self.tap_path(fitting.role)} {fitting.match}"
        if self.teacher_input is not None and (differences := self.teacher_input.differences()):
            where += f" of images with {differences}"
        return Origin.of(self._frozen[0], where, data, fitting.part)

    def export(self) -> nn.Module:
        """A copy of the student in eval mode, with the layers that methods added, without teacher, taps or gradients."""
        student = copied(self.student)
        for method in self._methods():
            student = method.export(student)
        for parameter in student.parameters():
            parameter.grad = None
        return student.eval()

    def train(self, mode: bool = True) -> Self:
        """As for any module, but a batch norm whose parameters are all frozen stays in eval mode, so that its statistics are frozen."""
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


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
