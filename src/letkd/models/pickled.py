"""Checks of a `.pth` file before torch loads it: record sizes, and nested tuples that would crash the interpreter."""

import io
import pickletools
from pathlib import Path
from typing import Any

import torch

from letkd.errors import CheckpointError

DEEPEST = 50  # nesting of tuples; a state dict has two or three levels
LARGEST_TUPLE = 1_000_000  # elements of a tuple, nested ones included
LARGEST_PICKLE = 2**28  # bytes; the pickle of a state dict, without values, has a few hundred per tensor
LEGACY_PICKLES = 5  # in a file that is not a zip: magic number, version, system, content, storage keys
ZIP = b"PK\x03\x04"

_Tree = tuple[int, int]  # depth and size of a tuple; (0, 1) for anything else
_LEAF: _Tree = (0, 1)


def check_pickle(path: Path) -> None:
    """Refuse a file of `torch.save` that would crash the process, or fill the memory, while torch reads it.

    Python hashes and frees tuples recursively in C: a dict key of a million nested tuples overflows the stack, and hashing a tuple that
    contains the next one twice, sixty levels deep, never ends. torch writes records uncompressed, so no record is larger than its file.
    """
    with path.open("rb") as file:
        if file.read(4) != ZIP:
            file.seek(0)
            _check_legacy(file, path)
            return
    reader: Any = torch._C.PyTorchFileReader(str(path))
    size = path.stat().st_size
    for record in reader.get_all_records():
        if reader.get_record_size(record) > (min(size, LARGEST_PICKLE) if record == "data.pkl" else size):
            raise CheckpointError(
                f"{path} is not a weights file: its part {record!r:.60} unpacks to more than the file; get it again"
            )
    if reader.has_record("data.pkl"):
        check_stream(io.BytesIO(reader.get_record("data.pkl")), path)


def _check_legacy(file: Any, path: Path) -> None:
    for _ in range(LEGACY_PICKLES):
        try:
            check_stream(file, path)
        except CheckpointError:
            raise
        except Exception:  # not a pickle: tensor values follow, or another kind of file, which torch reports
            return


def check_stream(stream: Any, path: object) -> None:
    """Trace one pickle without building objects. CheckpointError if it nests tuples too deeply, ValueError if it is not a pickle."""
    stack: list[_Tree | None] = []  # None is a mark
    memo: dict[Any, _Tree] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        top = (stack[-1] if stack else None) or _LEAF
        if "GET" in name:
            stack.append(memo.get(argument, _LEAF))
        elif "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if name == "MEMOIZE" else argument] = top
        elif name == "MARK":
            stack.append(None)
        elif name == "DUP":
            stack.append(top)
        else:
            parts = _taken(opcode, stack)
            tree = _LEAF
            if name.startswith("TUPLE"):
                tree = 1 + max((part[0] for part in parts), default=0), 1 + sum(part[1] for part in parts)
                if tree[0] > DEEPEST or tree[1] > LARGEST_TUPLE:
                    raise CheckpointError(
                        f"{path} nests tuples {tree[0]} deep, {tree[1]} elements in all, which no state dict does; "
                        "it was not read: get it again, or save a plain state dict"
                    )
            stack += [tree] * len(opcode.stack_after)


def _taken(opcode: Any, stack: list[_Tree | None]) -> list[_Tree]:
    """Pop an opcode's arguments from the stack: everything above the last mark, or a fixed number."""
    taken: list[_Tree] = []
    before = opcode.stack_before
    if pickletools.markobject in before:
        while stack and (part := stack.pop()) is not None:
            taken.append(part)
        before = before[: before.index(pickletools.markobject)]
    for _ in before:
        taken.append((stack.pop() if stack else None) or _LEAF)
    return taken
