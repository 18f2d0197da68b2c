"""The places where methods sit, proposed for a model that has no table of its own."""

from dataclasses import dataclass

from torch import Tensor, nn

from letkd.errors import TapError
from letkd.taps.tap import Ran, Tap, trace


@dataclass(frozen=True)
class _Map:
    path: str
    module: nn.Module
    shape: tuple[int, ...]

    @property
    def row(self) -> str:
        """The container that it is a numbered child of; "" if it is none's."""
        parent, _, child = self.path.rpartition(".")
        return parent if child.isdigit() else ""

    @property
    def size(self) -> tuple[int, ...]:
        return self.shape[-2:]


def find_taps(model: nn.Module, example: Tensor) -> dict[str, Tap]:
    """Propose `penultimate`, `intermediate`, `stage1` … `stageN` and `pooled` for a model that has no table of its own.

    penultimate: the last map with more than one pixel, at the shallowest path that gives it. intermediate: the first block of
    the last stage, i.e. the first of the siblings that all give maps of that size inside the last container; where its layers
    stand in a row without blocks, as in VGG, the first activation of the row. stage1 … stageN: the last map of each size, N at most
    4, the last ones. pooled: what the last linear layer is given. Only places count whose features depend on the image and reach the
    logits. A proposal to look at, not a promise: a network whose stages are not containers gets no `intermediate`, one whose
    classifier is no `nn.Linear` no `pooled`.

    Examples:
        >>> import torch
        >>> body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        >>> model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        >>> find_taps(model, torch.zeros(1, 3, 32, 32))["penultimate"]
        Tap(path='0', channels=8, stride=2, io='output')
    """
    return propose(trace(model, example), example)


def proposed_taps(model: nn.Module, example: Tensor) -> tuple[dict[str, Tap], str]:
    """As `find_taps`; for a model without maps what there is without them, and why."""
    try:
        ran = trace(model, example)
    except TapError as error:
        return {}, str(error)
    return proposals(ran, example)


def proposals(ran: list[Ran], example: Tensor) -> tuple[dict[str, Tap], str]:
    """What `proposed_taps` gives, from a trace that was made with `example`."""
    try:
        return propose(ran, example), ""
    except TapError as error:
        return _pooled(ran), str(error)


def propose(ran: list[Ran], example: Tensor) -> dict[str, Tap]:
    """What `find_taps` proposes, from a trace that was made with `example`."""
    # What runs twice cannot be tapped, so it is not proposed.
    done = sorted((item for item in ran if len(item.shapes) == 1 and item.path and item.live), key=lambda item: item.order)
    maps = [
        _Map(item.path, item.module, shape)
        for item in done
        for shape in item.shapes
        # Softmax and dropout give attention between tokens, [b heads n n], which looks like a map.
        if not isinstance(shape, str) and not isinstance(item.module, nn.Softmax | nn.Dropout)
        if _is_map(shape, tuple(example.shape))
    ]
    name = type(ran[0].module).__name__
    if not maps:
        raise TapError(f"{name} gives no map [b d h w] with more than one pixel; name the taps yourself")
    last = maps[-1]
    _must_be_a_map(name, maps, done)

    def tap(found: _Map) -> Tap:
        return Tap(found.path, channels=found.shape[1], stride=example.shape[-2] // found.shape[-2])

    first = _first_of_last_stage(maps, last.size) or _first_activation_of_last_row(maps, last.size)
    found = {"penultimate": tap(last)} | ({"intermediate": tap(first)} if first else {})
    stages = {f"stage{i}": tap(stage) for i, stage in enumerate(_stages(maps), start=1)}
    return found | stages | _pooled(ran)


def _stages(maps: list[_Map], most: int = 4) -> list[_Map]:
    """The last map of each size, from the size of the first block on, if there are blocks.

    Maps inside a block that gives another size do not count: they lie before its stride.
    """
    blocks = {found.path: found for found in maps if type(found.module).forward is not nn.Sequential.forward}
    last: dict[tuple[int, ...], _Map] = {}
    for found in maps:
        around = [blocks[path] for path in _above(found.path) if path in blocks]
        if all(block.size == found.size for block in around):
            last.pop(found.size, None)
            last[found.size] = found
    stages = list(last.values())
    of_blocks = {block.size for block in blocks.values() if _convolutions_in(block, maps) > 1}
    while of_blocks and stages[0].size not in of_blocks:
        stages.pop(0)  # the stem
    return stages[-most:]


def _convolutions_in(block: _Map, maps: list[_Map]) -> int:
    inside = (found for found in maps if found.path.startswith(f"{block.path}."))
    return sum(isinstance(found.module, nn.Conv2d) for found in inside)


def _above(path: str) -> list[str]:
    """The paths of the modules around a module, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _pooled(ran: list[Ran]) -> dict[str, Tap]:
    """The input of the last linear layer, if that gives the logits."""
    linear = [item for item in ran if isinstance(item.module, nn.Linear) and item.path and item.live and len(item.shapes) == 1]
    if not linear:
        return {}
    last, whole = max(linear, key=lambda item: item.order), ran[0].shapes[-1:]
    gives = last.shapes[0]
    if len(gives) != 2 or isinstance(gives, str) or (whole and not isinstance(whole[0], str) and whole[0] != gives):
        return {}
    return {"pooled": Tap(last.path, io="input")}


def _is_map(shape: tuple[int, ...], image: tuple[int, ...]) -> bool:
    """Whether a shape is [b d h w] with several pixels, which lie about as far apart in height as in width."""
    if len(shape) != 4 or shape[-2] * shape[-1] <= 1:
        return False
    down, across = image[-2] / shape[-2], image[-1] / shape[-1]
    return 0.5 < down / across < 2


def _must_be_a_map(name: str, maps: list[_Map], done: list[Ran]) -> None:
    paths = [item.path for item in done]
    later = [(item.path, item.shapes[0]) for item in done[paths.index(maps[-1].path) + 1 :]]
    other = [(path, shape) for path, shape in later if len(shape) > 2 and not isinstance(shape, str) and max(shape[1:-1]) > 1]
    if len(other) > len(maps):  # fewer are those of a pooling by attention behind a network of maps
        path, shape = other[-1]
        how = "in tokens [b n d]" if len(shape) == 3 else "with channels last [b h w d]"
        raise TapError(
            f"{name} goes on {how} after its last map ({path!r} gives {list(shape)}), and that is no map [b d h w]; use a method that "
            "reads logits alone (kd, dkd), or let a module of yours give it as a map and name that"
        )


def _first_of_last_stage(maps: list[_Map], size: tuple[int, ...]) -> _Map | None:
    paths = {found.path for found in maps}
    stages: dict[str, list[_Map]] = {}
    for found in maps:
        is_block = found.path.rpartition(".")[2].isdigit() and any(other.startswith(f"{found.path}.") for other in paths)
        if is_block and found.size == size:
            stages.setdefault(found.path.rpartition(".")[0], []).append(found)
    # Parts of a block can be numbered, too, and so can stages: of those with several blocks, the outer ones count.
    stages = {parent: blocks for parent, blocks in stages.items() if len(blocks) > 1} or stages
    inner = {
        parent
        for parent in stages
        for blocks in stages.values()
        for found in blocks
        if f"{parent}.".startswith(f"{found.path}.")
    }
    outer = [blocks for parent, blocks in stages.items() if parent not in inner]
    return outer[-1][0] if outer else None


def _first_activation_of_last_row(maps: list[_Map], size: tuple[int, ...]) -> _Map | None:
    here = [found for found in maps if found.size == size and found.row]
    row = [found for found in here if found.row == here[-1].row]
    active = [found for found in row[:-1] if type(found.module).__module__ == nn.ReLU.__module__]
    return active[0] if active else None
