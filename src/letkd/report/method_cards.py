"""Cards of the methods, generated from the methods and their recipes, for `letkd methods` and docs/methods.md."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from letkd.distiller import Distiller
from letkd.errors import RecipeError, UnsupportedPair
from letkd.methods import METHODS
from letkd.models import create_model
from letkd.progress import say
from letkd.recipes import Recipe, list_methods, resolve
from letkd.recipes.tables import leaves
from letkd.supervision import ConvSupervision
from letkd.supervision.kmeans import soft_assign
from letkd.supervision.subclass import transition_scores

PAIR = ("resnet56", "resnet20")
LABELS = (soft_assign, transition_scores, ConvSupervision)
GENERATED = "Generated from the methods and their recipes by `python -m letkd.report.method_cards > docs/methods.md`; do not edit by hand. "
HEAD = f"""# Methods

{GENERATED}First the
losses as formulae, then every row of the tables, including newer methods, with what it reads and its defaults. "Adds at inference"
is the number of parameters that the exported student has in addition to the plain one, for {{teacher}} → {{student}} with 100 classes.

Roles (`penultimate`, `stage1`, …) are places in a network, see the [glossary](architecture.md#glossary); a site is a role with labels per
pixel. "(2)": at two layers. "-LS": standardised logits. "sharp": the KD layer starts with a threshold. The rows `letkd-2-00` to
`letkd-inter-1` are the paper's ablations. To start: `kd` and `letkd-1-sharp`, with `--preset fast`.

| `--method` | row | reads from the teacher | adds at inference |
| --- | --- | --- | ---: |
{{overview}}

## Formulae

S is the student, T the teacher; b is the number of images, C of classes, d of channels, n of pixels. CE is the cross-entropy with
the true labels. Unless its formula says otherwise, a term is a mean over the batch; each is multiplied by the weight under
"Defaults". Losses are computed in float32 or better.
"""


@dataclass(frozen=True)
class Card:
    """Description of one row of the tables."""

    name: str
    title: str
    papers: str
    loss: str
    formulae: list[str]
    reads: str
    adds: str
    defaults: str


def cards() -> Iterator[Card]:
    """A card for every method that has a recipe."""
    for name in list_methods():
        if name == "teacher":
            continue
        try:
            yield card(name)
        except RecipeError as error:  # a plugin's recipe with a wrong key
            say(f"{name} is left out: {error}")


def card(name: str) -> Card:
    """The card of one method."""
    recipe = resolve("cifar100/rn56-rn20", method=name)
    classes = [METHODS[key] for key in recipe.methods]
    reads, adds = _on_the_pair(recipe)
    return Card(
        name,
        recipe.title,
        "; ".join(cls.paper for cls in classes) or "–",
        " + ".join(
            ["CE" if recipe.weights.get("ce", 1.0) or recipe.phases else "", *(cls.loss for cls in classes)]
        ).removeprefix(" + "),
        [cls.__name__ for cls in classes],
        reads,
        adds,
        _defaults(recipe),
    )


def _on_the_pair(recipe: Recipe) -> tuple[str, str]:
    methods = [METHODS[key].from_recipe(table) for key, table in recipe.methods.items()]
    if not methods:
        return "–", "0"
    teacher, student = (create_model(model, num_classes=100) for model in PAIR)
    bare = sum(parameter.numel() for parameter in student.parameters())
    try:
        distiller = Distiller(student, teacher, methods)
    except UnsupportedPair as error:
        return f"– ({error})", "–"
    shipped = sum(parameter.numel() for parameter in distiller.export().parameters())
    roles = {role for method in methods for role in method.reads.teacher or ("logits",)}
    return ", ".join(sorted(roles)), f"{shipped - bare:,}"


def _defaults(recipe: Recipe) -> str:
    values = [f"methods.{'.'.join(path)}={_short(value)}" for path, value in leaves(recipe.methods) if value != {}]
    values += [f"weight of {name} {weight:g}" for name, weight in recipe.weights.items()]
    values += [
        f"first {phase.epochs} epochs with {', '.join(f'{k} {v:g}' for k, v in phase.weights.items())}"
        for phase in recipe.phases
    ]
    return ", ".join(values) or "–"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def formula(function: Callable[..., Any]) -> str:
    """The first sentence of a loss's docstring and its indented formulae."""
    first, *paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = f"`{function.__name__}`: {' '.join(first.split())}\n"
    for paragraph in paragraphs:
        if paragraph.startswith("    "):
            lines = [line[4:].rstrip() for line in paragraph.splitlines()]
            text += "\n```text\n" + "\n".join(lines) + "\n```\n"
    return text


def as_markdown() -> str:
    """The page docs/methods.md."""
    every = list(cards())
    overview = "\n".join(f"| `{item.name}` | {item.title} | {item.reads} | {item.adds} |" for item in every)
    text = HEAD.format(teacher=PAIR[0], student=PAIR[1], overview=overview)
    text += "\n### Labels p_T of QUEST and LetKD\n\n" + "\n".join(formula(function) for function in LABELS)
    for cls in METHODS.values():
        text += f"\n### Loss of {cls.__name__}\n\n" + "\n".join(formula(function) for function in cls.formulae)
    for item in every:
        text += f"\n## {item.title}\n\n`--method {item.name}`\n\n"
        links = ", ".join(f"[{name}](#loss-of-{name.lower()})" for name in item.formulae) or "CE alone"
        text += f"- Paper: {item.papers}\n- Loss: {item.loss}\n- Formula: {links}\n- Reads from the teacher: {item.reads}\n"
        text += f"- Adds at inference: {item.adds}\n- Defaults: {item.defaults}\n"
    return text


if __name__ == "__main__":
    print(as_markdown(), end="")
