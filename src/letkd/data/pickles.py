"""Reads the pickles of the official CIFAR files without running any code that a pickle names."""

import io
import pickle
from typing import Any

import numpy as np

from letkd.data.pictures import printable
from letkd.errors import DataError

MOST_READS = 4_000_000  # a CIFAR file needs less than a million


class _Sealed:
    """Base of the classes that a pickle may name. `__setstate__` keeps a pickle from setting attributes of the class itself."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("unexpected state")


class _Encode(_Sealed):
    """Replaces `_codecs.encode`, which newer pickles of old protocols use to write bytes.

    Args:
        room: largest number of bytes over all calls, since a pickle can refer to one text many times.
    """

    def __init__(self, room: int):
        self.room = room

    def __call__(self, text: str, encoding: str | bytes) -> bytes:
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"bytes encoded as {encoding!r:.40}")
        self.room -= len(text)
        if self.room < 0:
            raise ValueError("more bytes than the file has")
        return text.encode("latin1")


class _Counted(io.BytesIO):
    """A file that raises an error after more reads than any CIFAR file needs: every item of a pickle costs memory."""

    left = MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._count()
        return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        self._count()
        return super().readline(size)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("more items than a CIFAR file has")


class _Dtype(_Sealed):
    """Replaces `numpy.dtype`; uint8 is the only type in a CIFAR file."""

    def __init__(self, kind: str | bytes, *flags: int):
        if kind not in ("u1", b"u1"):
            raise ValueError(f"numbers of type {kind!r:.40}, not bytes")

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and other settings, which do not apply to uint8."""


class Array(_Sealed):
    """Replaces `numpy.ndarray` and the function that creates an empty one; the state that follows fills it."""

    def __init__(self, *made_from: Any):
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype):
            raise ValueError("an array without its type")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


_InPython: Any = pickle._Unpickler


class Unpickler(_InPython):
    """Reads a pickle without importing or calling anything it names: the few names in a CIFAR file are replaced by stand-ins.

    It extends the unpickler written in Python: the one in C allocates a memo of any size that a file asks for. Only text and bytes
    may be keys, because hashing a deeply nested tuple overflows the stack.
    """

    STAND_INS = {  # noqa: RUF012
        "numpy.core.multiarray._reconstruct": Array,
        "numpy._core.multiarray._reconstruct": Array,
        "numpy.ndarray": Array,
        "numpy.dtype": _Dtype,
    }

    def __init__(self, where: str, content: bytes):
        super().__init__(_Counted(content), encoding="bytes")
        self.where, self.encode = where, _Encode(len(content))

    def _load_frame(self) -> None:
        self.read(8)  # the frame's length, only a hint for reading ahead

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items[::2], items[1::2])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        if not all(isinstance(key, (bytes, str)) for key in keys) or not isinstance(self.stack[-1], dict):
            raise ValueError("entries without names")
        self.stack[-1].update(zip(keys, values, strict=True))

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        asked = f"{module_name}.{global_name}"
        if asked == "_codecs.encode":
            return self.encode
        if asked not in self.STAND_INS:
            raise DataError(
                f"{self.where} asks to load {printable(asked[:100])}, which no official CIFAR file does; it was refused and nothing "
                "was run: use the file of the official archive"
            )
        return self.STAND_INS[asked]

    dispatch = {  # noqa: RUF012
        **_InPython.dispatch,
        pickle.FRAME[0]: _load_frame,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.SETITEM[0]: _load_setitem,
        pickle.DICT[0]: _load_dict,
    }
    for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
        del dispatch[code[0]]


def as_text(text: bytes | str) -> str:
    """Text from text or bytes; Python 2 pickled its strings as bytes."""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def read_pickle(where: str, content: bytes) -> dict[str, Any]:
    """The entries of a pickled dictionary. Arrays are returned as `Array`, strings of Python 2 as bytes.

    Args:
        where: name of the file in error messages.
    """
    try:
        found = Unpickler(where, content).load()
    except DataError:
        raise
    except Exception as error:  # bytes that are not a pickle can raise any error
        raise DataError(
            f"{where} is not a readable pickle ({printable(str(error)[:200])}): it is cut short or another file; download it again"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{where} holds a {type(found).__name__}, not the entries of a CIFAR file; download it again")
    return {as_text(key): value for key, value in found.items() if isinstance(key, (bytes, str))}
