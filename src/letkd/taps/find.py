"""Taps proposed for a model without a role table."""

from torch import Tensor, nn

from letkd.errors import TapError
from letkd.taps.outputs import is_backbone
from letkd.taps.tap import Tap
from letkd.taps.token_sites import Place, kind_of, last_blocks, places_in, propose_places
from letkd.taps.tracing import ModuleRun, trace


def find_taps(model: nn.Module, example: Tensor) -> dict[str, Tap]:
    """Propose `penultimate`, `intermediate`, `stage1` … `stageN` and `pooled` for a model without a role table.

    - penultimate: the last map with more than one pixel, at the shortest module path that returns it.
    - intermediate: the first block of the last stage, that is, the first of the siblings in the last container that return maps of this
      size; if there are layers instead of blocks, as in VGG, the first activation among them.
    - stage1 … stageN: the last map of each size, at most the last 4.
    - pooled: the input of the last linear layer.

    Only modules whose output depends on the image and reaches the model's output are proposed. Check the proposals: a network
    whose stages are not containers has no `intermediate`, and one whose classifier is not an `nn.Linear` has no `pooled`.

    In networks with tokens or channels-last maps, taps have a layout. penultimate is then the last module whose pixels reach the output;
    blocks of equal size, as in a ViT, are divided into four stages of equally many blocks.

    Examples:
        >>> import torch
        >>> body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        >>> model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        >>> find_taps(model, torch.zeros(1, 3, 32, 32))["penultimate"]
        Tap(path='0', channels=8, stride=2, io='output', layout='map', prefix=None, grid=None)
    """
    return propose(trace(model, example), example)


def proposed_taps(model: nn.Module, example: Tensor) -> tuple[dict[str, Tap], str]:
    """Like `find_taps`; for a model without maps, the taps that do not need maps, and the reason as text."""
    try:
        ran = trace(model, example)
    except TapError as error:
        return {}, str(error)
    return proposals(ran, example)


def proposals(ran: list[ModuleRun], example: Tensor) -> tuple[dict[str, Tap], str]:
    """The result of `proposed_taps`, from a trace made with `example`."""
    try:
        return propose(ran, example), ""
    except TapError as error:
        return _pooled(ran), str(error)


def propose(ran: list[ModuleRun], example: Tensor) -> dict[str, Tap]:
    """The result of `find_taps`, from a trace made with `example`."""
    # A module that runs twice cannot be tapped, so it is not proposed.
    done = sorted((item for item in ran if len(item.shapes) == 1 and item.path and item.live), key=lambda item: item.order)
    places = places_in(done, ran[0].module, example)
    if not places:
        raise TapError(
            f"{type(ran[0].module).__name__} has no map [b d h w], no tokens [b n d] and no channels-last map [b h w d] of more than one "
            "pixel; name the taps yourself"
        )
    if kind_of(places) is not type(None):
        return _propose_tokens(places, ran, example) | _pooled(ran)
    maps = [place for place in places if place.layout is None]
    last = maps[-1]

    def tap(found: Place) -> Tap:
        return found.tap(example)

    first = (
        _first_of_last_stage(maps, last.size) or _first_activation_of_last_row(maps, last.size) or _first_named(maps, last.size)
    )
    found = {"penultimate": tap(last)} | ({"intermediate": tap(first)} if first else {})
    stages = {f"stage{i}": tap(stage) for i, stage in enumerate(_stages(maps), start=1)}
    return found | stages | _pooled(ran)


def _propose_tokens(places: list[Place], ran: list[ModuleRun], example: Tensor) -> dict[str, Tap]:
    model = ran[0].module
    last, first, stages = propose_places(places, model, example, headless=_is_headless(ran))
    if last is None:
        raise TapError(
            f"no module of {type(model).__name__} returns tokens or a map that reaches its output; name the taps yourself"
        )
    found = {"penultimate": last} | ({"intermediate": first} if first else {})
    found |= {f"stage{i}": stage for i, stage in enumerate(stages, start=1)}
    return {role: place.tap(example) for role, place in found.items()}


def _stages(maps: list[Place], most: int = 4) -> list[Place]:
    """The last map of each size, from the size of the first block on, if there are blocks.

    Maps inside a block that returns another size are not counted: they come before its stride.
    """
    blocks = {found.path: found for found in maps if type(found.module).forward is not nn.Sequential.forward}
    last: dict[tuple[int, ...], Place] = {}
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


def _convolutions_in(block: Place, maps: list[Place]) -> int:
    inside = (found for found in maps if found.path.startswith(f"{block.path}."))
    return sum(isinstance(found.module, nn.Conv2d) for found in inside)


def _above(path: str) -> list[str]:
    """The paths of the modules that contain a module, outermost first."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _pooled(ran: list[ModuleRun]) -> dict[str, Tap]:
    """The input of the last linear layer, if it computes the logits; for a backbone without a classifier, its last vector."""
    if _is_headless(ran):
        vectors = [item for item in ran if item.path and item.live and [len(shape) for shape in item.shapes] == [2]]
        return {"pooled": Tap(max(vectors, key=lambda item: item.order).path)} if vectors else {}
    linear = [item for item in ran if isinstance(item.module, nn.Linear) and item.path and item.live and len(item.shapes) == 1]
    if not linear:
        return {}
    last, whole = max(linear, key=lambda item: item.order), ran[0].shapes[-1:]
    gives = last.shapes[0]
    if len(gives) != 2 or isinstance(gives, str) or (whole and not isinstance(whole[0], str) and whole[0] != gives):
        return {}
    return {"pooled": Tap(last.path, io="input")}


def _is_headless(ran: list[ModuleRun]) -> bool:
    """Whether the model returns something other than logits [b C]."""
    return is_backbone(ran[0].module) or [isinstance(shape, str) or len(shape) != 2 for shape in ran[0].shapes] == [True]


def _first_of_last_stage(maps: list[Place], size: tuple[int, ...]) -> Place | None:
    paths = {found.path for found in maps}
    stages: dict[str, list[Place]] = {}
    for found in maps:
        is_block = found.path.rpartition(".")[2].isdigit() and any(other.startswith(f"{found.path}.") for other in paths)
        if is_block and found.size == size:
            stages.setdefault(found.path.rpartition(".")[0], []).append(found)
    # Parts of a block can be numbered, too, and so can stages: among those with several blocks, the outermost are used.
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


def _first_named(maps: list[Place], size: tuple[int, ...]) -> Place | None:
    """The first of named and numbered blocks, such as `s4.b1` in RegNet."""
    blocks = last_blocks(maps, size, strided=True)
    return blocks[0] if len(blocks) > 1 and "." in blocks[0].path else None


def _first_activation_of_last_row(maps: list[Place], size: tuple[int, ...]) -> Place | None:
    here = [found for found in maps if found.size == size and found.row]
    row = [found for found in here if found.row == here[-1].row]
    active = [found for found in row[:-1] if type(found.module).__module__ == nn.ReLU.__module__]
    return active[0] if active else None
