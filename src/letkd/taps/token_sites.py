"""Taps in networks with patch tokens [b n d] or channels-last maps [b h w d]: which modules return them, and which to propose."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from letkd.taps.layouts import ChannelsLast, Layout, TokenFacts
from letkd.taps.tap import Tap
from letkd.taps.tracing import ModuleRun, pixels_reach

QUARTERS = 4  # number of stages if all blocks of a network have the same size


@dataclass(frozen=True)
class Place:
    """A module whose output can be read as a map of `shape` [b d h w]. `layout` is None for a plain map."""

    path: str
    module: nn.Module
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def row(self) -> str:
        """The container if the module is a numbered child; otherwise ""."""
        parent, _, child = self.path.rpartition(".")
        return parent if child.isdigit() else ""

    @property
    def size(self) -> tuple[int, ...]:
        return self.shape[-2:]

    def is_inside(self, others: Iterable["Place"]) -> bool:
        return any(self.path.startswith(f"{other.path}.") for other in others)

    def tap(self, example: Tensor) -> Tap:
        layout = "map" if self.layout is None else "channels-last" if isinstance(self.layout, ChannelsLast) else "tokens"
        return Tap(self.path, channels=self.shape[1], stride=example.shape[-2] // self.shape[-2], layout=layout)


def places_in(done: list[ModuleRun], model: nn.Module, example: Tensor) -> list[Place]:
    """Every module that returns features with more than one pixel, in the order of execution, each with its layout.

    If a shape could be a map or a channels-last map, the layout of most other modules is assumed.
    """
    facts, image, found = TokenFacts.of(model), (example.shape[-2], example.shape[-1]), []
    for item in done:
        shape = item.first or item.shapes[0]
        # Softmax and dropout may return attention between tokens, [b heads n n], which looks like a map.
        if isinstance(shape, str) or shape[0] != len(example) or isinstance(item.module, nn.Softmax | nn.Dropout):
            continue
        if len(shape) == 4:
            last = Place(item.path, item.module, (shape[0], shape[3], shape[1], shape[2]), ChannelsLast())
            maps = [] if item.first else [Place(item.path, item.module, shape)]  # a map in a tuple cannot be tapped
            options = [place for place in (*maps, last) if _is_map(place.shape, image)]
            best = min((_stretch(place.shape, image) for place in options), default=1.0)
            found += [place for place in options if _stretch(place.shape, image) == best]
        elif len(shape) == 3 and shape[2] > 1 and (tokens := facts.place(shape[1], image)) is not None:
            place = Place(item.path, item.module, (shape[0], shape[2], *tokens.grid), tokens)
            found += [place] if _is_map(place.shape, image) else []
    both = {path for path, n in Counter(place.path for place in found).items() if n > 1}
    clear = [place for place in found if place.path not in both]
    kind = ChannelsLast if kind_of(clear) is ChannelsLast else type(None)
    return [place for place in found if place.path not in both or isinstance(place.layout, kind)]


def kind_of(places: list[Place]) -> type:
    """The layout of a network, judged by its outermost modules: `NoneType` for maps."""
    # In a network of maps, a few tokens after the last map belong to attention pooling.
    last = max((i for i, place in enumerate(places) if place.layout is None), default=-1)
    later = places[last + 1 :]
    if len(later) > sum(place.layout is None for place in places):
        return type(later[-1].layout)
    outermost = [place for place in places if not place.is_inside(places)]
    counted = Counter(type(place.layout) for place in outermost)
    kind, n = max(counted.items(), key=lambda item: item[1], default=(type(None), 0))
    return kind if n > counted[type(None)] else type(None)


def propose_places(
    places: list[Place], model: nn.Module, example: Tensor, *, headless: bool
) -> tuple[Place | None, Place | None, list[Place]]:
    """`penultimate`, `intermediate` and at most four stages.

    penultimate: the last module, not inside a block, whose pixels reach the output. A network that classifies by its class token
    reads the patches for the last time in its last block, so it is the block before. intermediate: the first block of the last
    stage. stages: the last block of each size; blocks of equal size are divided into four stages of equally many blocks.

    Args:
        headless: whether the model is a backbone without a classifier; its tokens then need not reach the output.
    """
    blocks = last_blocks(places, places[-1].size)
    outer = [place for place in places if not place.is_inside(blocks)]
    last = next((place for place in reversed(outer) if headless or _reaches(place, model, example)), None)
    if last is None:
        return None, None, []
    order = {place.path: i for i, place in enumerate(places)}
    before = [block for block in blocks if order[block.path] < order[last.path]]
    if len({block.size for block in _numbered(places)}) > 1:
        return last, next(iter(before), None), _last_of_each_size(places)[-QUARTERS:]
    ends = sorted({-(-len(blocks) * (i + 1) // QUARTERS) - 1 for i in range(QUARTERS)}) if blocks else []
    first = ends[-2] + 1 if len(ends) > 1 else 0
    stages = [blocks[end] for end in ends[:-1] if blocks[end] in before]
    return last, before[min(first, len(before) - 1)] if before else None, [*stages, last]


def _reaches(place: Place, model: nn.Module, example: Tensor) -> bool:
    return place.layout is None or pixels_reach(model, place.path, place.layout, example)


def _numbered(places: list[Place]) -> list[Place]:
    """Numbered modules that contain other places: blocks and stages."""
    return [place for place in places if place.path[-1:].isdigit() and any(other.is_inside([place]) for other in places)]


def _last_of_each_size(places: list[Place]) -> list[Place]:
    numbered = _numbered(places)
    last: dict[tuple[int, ...], Place] = {}
    for place in places:
        if place in numbered or not place.is_inside(numbered):
            last.pop(place.size, None)
            last[place.size] = place
    return list(last.values())


def last_blocks(places: list[Place], size: tuple[int, ...], *, strided: bool = False) -> list[Place]:
    """The blocks of the last stage: numbered siblings of this size and of one class, at the outermost level with several of them."""
    rows: dict[tuple[str, type], list[Place]] = {}
    numbered = _numbered(places)
    for place in numbered:
        # A stage with a smaller output than its blocks is not a block; a block with a stride is.
        if place.size == size and (strided or all(other.size == size for other in numbered if other.is_inside([place]))):
            rows.setdefault((place.path.rstrip("0123456789"), type(place.module)), []).append(place)
    several = {row: blocks for row, blocks in rows.items() if len(blocks) > 1} or rows
    outer = [blocks for blocks in several.values() if not blocks[0].is_inside(p for row in several.values() for p in row)]
    return outer[-1] if outer else []


def _is_map(shape: tuple[int, ...], image: tuple[int, int]) -> bool:
    """Whether a shape is [b d h w] with several pixels and about the image's proportions."""
    return shape[-2] * shape[-1] > 1 and _stretch(shape, image) < 2


def _stretch(shape: tuple[int, ...], image: tuple[int, int]) -> float:
    """Ratio of the pixel spacings along the two axes; 1 for a grid with the image's proportions."""
    down, across = image[0] / shape[-2], image[1] / shape[-1]
    return max(down / across, across / down)
