"""The base class of methods: named, unweighted loss terms, computed from features that are read by role."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from letkd.batch import Batch
from letkd.errors import LetkdError, RecipeError, TapError, UnsupportedPair, nearest
from letkd.functional import AS_IT_IS, GridMatch
from letkd.methods.values import wrong_values
from letkd.supervision.base import Supervision
from letkd.supervision.fitted import Fitted
from letkd.supervision.labels import Labels
from letkd.taps import (
    Graft,
    Replacement,
    Tap,
    Taps,
    as_logits,
    as_taps,
    graft,
    replace_module,
    run_once,
)
from letkd.taps.layouts import Tokens
from letkd.taps.outputs import is_backbone, logits_in
from letkd.taps.tracing import pixels_reach


@dataclass
class View:
    """What a method gets in one step: the batch, and both networks' features by role (including `logits`).

    With a cache, `teacher` contains only the vectors that the methods' `lessons` name, and `labels` contains p_T by site. `second` is the
    same for the batch's second view, if a method sets `two_views`. `same_classes`: whether the teacher predicts the student's classes.
    `unused`: the terms of weight 0, which a method may leave out; their supervision may not be fitted.

    Examples:
        >>> from letkd.methods.kd import KD
        >>> logits, batch = torch.randn(2, 3), Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))
        >>> KD().terms(View(batch, {"logits": logits}, {"logits": logits}))["kd"].abs() < 1e-6  # equal logits: no loss
        tensor(True)
    """

    batch: Batch
    student: dict[str, Tensor]
    teacher: dict[str, Tensor]
    labels: dict[str, Labels] = field(default_factory=dict)
    second: "View | None" = None
    same_classes: bool = True
    unused: frozenset[str] = frozenset()

    def over_images(self, supervision: Supervision, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`loss(images, y)`, where `images` are the positions of the images that the supervision has labels for, and `y` their classes.

        Labels that do not depend on the class exist for all images, including mixed images and images without a class.
        """
        every = torch.arange(len(self.batch.y), device=self.batch.y.device)
        if not supervision.reads_classes:
            return loss(every, self.batch.y)
        return self._classified(supervision).over_labels(loss, every)

    def _classified(self, supervision: Supervision) -> Batch:
        """The batch; images without a label get the class that the teacher predicts, if the supervision accepts it."""
        if not (self.same_classes and supervision.unlabelled == "teacher"):
            return self.batch
        logits = self.teacher.get("logits")  # if absent, the cached labels already use them
        return self.batch.filled(torch.zeros_like(self.batch.y) if logits is None else logits.argmax(dim=1))

    def of_second(self) -> "View":
        """The same for the second view of the images."""
        if self.second is None:
            raise LetkdError(
                "a method reads a second view of the images, but its class does not request one; set two_views = True in the class"
            )
        return self.second


class Side:
    """One network of the pair, as passed to `Method.build`: its role table, and the shapes of an example's features."""

    def __init__(
        self,
        model: nn.Module,
        taps: Mapping[str, Tap | str] | None,
        example: Tensor,
        *,
        who: str,
        order: tuple[int, ...] | None = None,
        dense: bool = False,
    ):
        self.model, self.who = model, who
        self.order = order  # of its classes; see `TeacherInput`
        self.taps = as_taps(model, taps)
        reads = Taps(model, self.taps)
        output, features = run_once(reads, example)
        self._layouts, self._output, self._example, self._dense = reads.layouts, output, example, dense
        if order is not None and sorted(order) != list(range(self.num_classes)):
            raise UnsupportedPair(
                f"the order of the {who}'s classes has {len(order)} entries, but {type(model).__name__} has {self.num_classes} "
                "logits; name each index from 0 once"
            )
        self.shapes = {role: tuple(f.shape[1:]) for role, f in features.items()}
        self.grafts: list[Graft | Replacement] = []

    @property
    def has_logits(self) -> bool:
        """Whether the network returns logits [b C]; a backbone without a classifier may not."""
        return logits_in(self._output) is not None and not is_backbone(self.model)

    @property
    def num_classes(self) -> int:
        """Number of logits; 0 if the network returns something else, which is allowed with the user's own task."""
        return 0 if self._dense and not self.has_logits else as_logits(self._output, self.model).shape[1]

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the features at a role, without the batch."""
        if role not in self.shapes:
            raise TapError(
                f"the {self.who} {type(self.model).__name__} has no tap for the role {role!r} (it has: {', '.join(self.taps) or 'none'}); "
                f"name one with {self.who}_taps={{{role!r}: 'module.path'}} or --{self.who}-tap {role}=module.path"
            )
        return self.shapes[role]

    def map_shape(self, role: str) -> tuple[int, int, int]:
        """d, h, w of the map at a role; anything that is not a map is an error."""
        shape = self.shape(role)
        if len(shape) != 3:
            tokens = f"for patch tokens [b n d] write {self.taps[role].path}:tokens, or Tap(…, layout='tokens')"
            do = "name a module before the pooling" if len(shape) < 2 else tokens
            raise TapError(
                f"tap {role!r} of the {self.who}: {self.taps[role].path!r} gives [b {' '.join(map(str, shape))}], and a map [b d h w] "
                f"is needed; {do}"
            )
        return shape[0], shape[1], shape[2]

    def width(self, role: str) -> int:
        """d of the vector at a role; anything that is not a vector is an error."""
        d, *rest = self.shape(role)
        if any(n != 1 for n in rest):
            raise TapError(
                f"tap {role!r} of the {self.who}: {self.taps[role].path!r} gives [b {' '.join(map(str, self.shape(role)))}], "
                "and a vector [b d] is needed; name the pooling, or the classifier's input"
            )
        return d

    def stages(self) -> list[str]:
        """The roles `stage1` … `stageN` of this network, from input to output."""
        numbers = [role[5:] for role in self.taps if role.startswith("stage")]
        return [f"stage{n}" for n in sorted(int(number) for number in numbers if number.isdigit())]

    def graft(self, layer: nn.Module, role: str, name: str) -> str:
        """Insert a layer after the module of a role; return the layer's module path."""
        tap = self.taps[role]
        if tap.io != "output":
            raise TapError(f"tap {role!r} of the {self.who} is an input; a layer can only follow a module's output")
        layout = self._layouts.get(role)
        if isinstance(layout, Tokens) and not pixels_reach(self.model, tap.path, layout, self._example):
            raise TapError(
                f"tap {role!r} of the {self.who}: the patch tokens at {tap.path!r} do not reach the output of "
                f"{type(self.model).__name__}, which reads only its other tokens from there on, so a layer would have no effect; name an "
                "earlier block (`letkd taps` proposes one)"
            )
        layer = layer.to(self._example.device)
        self.grafts.append(added := graft(self.model, layer, after=tap.path, name=name, layout=layout))
        return added.path

    def replace(self, role: str, module: nn.Module) -> None:
        """Replace the module of a role."""
        self.grafts.append(replace_module(self.model, self.taps[role].path, module.to(self._example.device)))


Part = TypeVar("Part", bound=Fitted, covariant=True)


@dataclass(frozen=True)
class Fitting(Generic[Part]):
    """An offline part: what is fitted, the role of the teacher's features, the term that needs it, and how the features are resized."""

    part: Part
    role: str
    term: str
    match: GridMatch = AS_IT_IS

    def f_T(self, features: Mapping[str, Tensor]) -> Tensor:
        """The map that it is fitted to, from the teacher's features by role."""
        return self.match(features[self.role])


@dataclass(frozen=True)
class Lessons:
    """What a method's steps need from the teacher, if it is small enough to be cached for every image (`letkd.distiller.cache`).

    Args:
        vectors: roles whose features, one vector per image, are read.
        labels: sites whose labels are read.
    """

    vectors: tuple[str, ...] = ()
    labels: Mapping[str, Fitting[Supervision]] = field(default_factory=dict)


@dataclass
class Reads:
    """The features that a method reads at every step."""

    student: dict[str, Tap] = field(default_factory=dict)
    teacher: dict[str, Tap] = field(default_factory=dict)


Built = TypeVar("Built")


def construct(make: Callable[..., Built], table: Any, where: str, *, wrong: Sequence[str] = ()) -> Built:
    """Call a constructor with a recipe's table; one error names all unknown keys and invalid values, and what else was `wrong`."""
    takes, table = inspect.signature(make).parameters, as_table(table, where)
    unknown = [f"{where} has no key {key!r} (nearest: {nearest(key, takes)})" for key in table if key not in takes]
    wrong = [*wrong, *unknown, *(f"{where} cannot be made of {table}: {text}" for text in wrong_values(make, table))]
    if wrong:
        raise RecipeError("; ".join(wrong))
    try:
        return make(**table)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where} cannot be made of {table}: {str(error).splitlines()[0]}") from None


def as_table(value: Any, where: str) -> dict[str, Any]:
    """A recipe's value that must be a table."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"{where} is {value!r}, but it must be a table")
    return dict(value)


@contextmanager
def collected(wrong: list[str]) -> Iterator[None]:
    """Collect a recipe's error instead of raising it, so that all errors are found."""
    try:
        yield
    except RecipeError as error:
        wrong.append(str(error))


class Method(nn.Module):
    """One row of the paper's tables.

    Methods to override: `build` checks the pair, adds adapters and grafts, and fills `self.reads`; `fittings` returns the offline parts;
    `terms` returns the losses, each a scalar without weight; `export` returns the student to ship. If `fused` is set before `build` and
    the method has a form that needs less time and memory, that form is used; it differs by rounding and by the tail of p_T
    (docs/deviations.md, D48). Read labels with `view.batch.over_labels`, which handles mixed images and images without a label.

    Class attributes: `loss` describes the loss in words, the docstrings of `formulae` in symbols. With `two_views`, both networks also
    see the batch's second view. `unmixable` says why the method cannot learn from mixed images, if it cannot.

    Examples:
        >>> class Regress(Method):
        ...     name, paper, loss, formulae = "regress", "–", "mean squared error of the logits", ()
        ...
        ...     def terms(self, view):
        ...         return {"regress": nn.functional.mse_loss(view.student["logits"], view.teacher["logits"])}
        >>> Regress().term_names()
        ('regress',)
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    loss: ClassVar[str]
    formulae: ClassVar[tuple[Callable[..., Any], ...]]
    two_views: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True  # the teacher's logits or classifier: both networks must then have the same classes
    unmixable: ClassVar[str] = ""
    needs_labels: ClassVar[str] = ""  # why it cannot learn if no image has a label
    warmup: int = 0  # epochs until its terms have their full weight
    knows_images: ClassVar[bool] = False  # whether it stores a row per training image, so that other images have no terms
    least_images: ClassVar[int] = 1  # in a batch, for its terms in eval mode

    def __init__(self):
        super().__init__()
        self.reads = Reads()
        self.fused = False
        self.images: int | None = None  # in the training set, if known
        self.is_built = False  # for a Distiller; each Distiller needs its own method object

    @classmethod
    def from_recipe(cls, table: Any) -> Self:
        """The method from its table in a recipe: the keys are the constructor's arguments."""
        return construct(cls, table, cls.name)

    def build(self, student: Side, teacher: Side) -> None:
        """Prepare for this pair. Raises `UnsupportedPair` if the method does not work with it."""

    def fittings(self) -> Mapping[str, Fitting[Fitted]]:
        """Offline parts by site."""
        return {}

    def why_labels(self) -> str:
        """Why the method cannot learn if no image has a label; "" if it can."""
        kinds = [fitting.part for fitting in self.fittings().values() if fitting.part.needs_labels]
        return self.needs_labels or (f"its labels at {kinds[0].where!r} are sub-classes of the classes" if kinds else "")

    def grafted(self) -> dict[str, str]:
        """Term of each layer in the student that the student's own loss must train, by module path."""
        return {}

    def measured_at(self, term: str) -> tuple[str, ...]:
        """The student's roles at which gradients are compared for an automatic weight of a term."""
        return tuple(self.reads.student) or ("logits",)

    def warmed_up(self, epochs: int | None) -> float:
        """The factor of a term that rises linearly over `warmup` epochs: min(epochs / warmup, 1); 1 if the epoch is not known."""
        return 1.0 if epochs is None or not self.warmup else min(epochs / self.warmup, 1.0)

    def lessons(self) -> Lessons | None:
        """What a cache must store for this method; None if its steps need whole maps of the teacher, which are not cached."""
        return None

    def term_names(self) -> tuple[str, ...]:
        """The names of its loss terms, known once built. If all their weights are 0, the method is left out of the step."""
        return (self.name,)

    def terms(self, view: View) -> dict[str, Tensor]:
        """The unweighted loss terms of one step; those in `view.unused` may be missing."""
        raise NotImplementedError

    def export(self, student: nn.Module) -> nn.Module:
        """The student to ship, given a copy of the trained student."""
        return student


def need_equal_classes(student: Side, teacher: Side, methods: Sequence[Method], foreign: str = "") -> None:
    """Raise an error if a method reads the teacher's logits and the networks have different classes.

    Args:
        foreign: why the teacher's classes differ from the student's, even if their number is equal.
    """
    readers = ", ".join(method.name for method in methods if method.reads_logits)
    if not readers:
        return
    if not student.num_classes:
        raise UnsupportedPair(
            f"{readers} compares logits [b C], and the student {type(student.model).__name__} returns none; use a method that reads only "
            "features (letkd-1, quest)"
        )
    if foreign:
        raise UnsupportedPair(f"{readers} reads the teacher's logits, and {foreign}")
    if not teacher.has_logits:
        raise UnsupportedPair(
            f"{readers} reads the teacher's logits, and {type(teacher.model).__name__} has no classifier; use a teacher that has one, or "
            "a method that reads only features (letkd-1, letkd-2, quest, fitnet, at, ab, fsp, sp, vid, crd, reviewkd)"
        )
    if student.num_classes != teacher.num_classes:
        raise UnsupportedPair(
            f"the student {type(student.model).__name__} has {student.num_classes} classes and the teacher "
            f"{type(teacher.model).__name__} {teacher.num_classes}; {readers} compares their logits: build both for the same classes"
        )


def need_own_parameters(student: nn.Module, teacher: nn.Module) -> None:
    """Raise an error if the networks share parameters that the student would train."""
    frozen = set(teacher.parameters())
    shared = [name for name, parameter in student.named_parameters() if parameter.requires_grad and parameter in frozen]
    if shared:
        raise LetkdError(
            f"student and teacher share {len(shared)} parameters ({', '.join(shared[:3])}{', …' if len(shared) > 3 else ''}), which would "
            "be frozen with the teacher; copy these modules with copy.deepcopy, or freeze them to keep them as they are"
        )


def need_unused(methods: Sequence[Method]) -> None:
    """Raise an error if a method already belongs to another Distiller: it holds the layers of one pair."""
    if used := [type(method).__name__ for method in methods if method.is_built]:
        raise LetkdError(
            f"this {used[0]} already belongs to another Distiller, and they would share templates and adapters; create a new one for each"
        )


def paired_stages(student: Side, teacher: Side) -> list[str]:
    """The roles `stage1` … `stageN`, which both networks must have, with a map at each."""
    for side in (student, teacher):
        for role in side.stages() or ["stage1"]:
            side.map_shape(role)
    if student.stages() != teacher.stages():
        raise UnsupportedPair(
            f"the student {type(student.model).__name__} has {', '.join(student.stages())} and the teacher "
            f"{type(teacher.model).__name__} {', '.join(teacher.stages())}, so their stages cannot be paired; name equally many of "
            "both by taps"
        )
    return student.stages()
