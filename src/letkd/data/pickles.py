"""Reads the pickles of the official CIFAR files and runs nothing that a pickle names."""

import io
import pickle
from typing import Any

import numpy as np

from letkd.errors import DataError


class _Sealed:
    """What a pickle may ask for by name. Having `__setstate__` keeps a pickle from setting attributes of the class itself."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("state where none belongs")


class _Bytes(_Sealed):
    """Stands for `_codecs.encode`, by which newer pickles of old protocols write bytes."""

    def __new__(cls, text: str, encoding: str | bytes):
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"bytes written as {encoding!r:.40}")
        return text.encode("latin1")


class _Dtype(_Sealed):
    """Stands for `numpy.dtype`: bytes are the only numbers in a CIFAR file."""

    def __init__(self, kind: str | bytes, *flags: int):
        if kind not in ("u1", b"u1"):
            raise ValueError(f"numbers of type {kind!r:.40}, not bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which bytes do not have."""


class Array(_Sealed):
    """Stands for `numpy.ndarray` and for the function that makes an empty one; the state that follows fills it."""

    def __init__(self, *made_from: Any):
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype):
            raise ValueError("an array without its type")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class Unpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling anything it names: the few names a CIFAR file needs get stand-ins."""

    STAND_INS = {  # noqa: RUF012
        "numpy.core.multiarray._reconstruct": Array,
        "numpy._core.multiarray._reconstruct": Array,
        "numpy.ndarray": Array,
        "numpy.dtype": _Dtype,
        "_codecs.encode": _Bytes,
    }

    def __init__(self, where: str, content: bytes):
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.where = where

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        asked = f"{module_name}.{global_name}"
        if asked not in self.STAND_INS:
            raise DataError(
                f"{self.where} asks to load {asked}, which no official CIFAR file does; it was refused and nothing was run: "
                "use the file of the official archive"
            )
        return self.STAND_INS[asked]


def as_text(text: bytes | str) -> str:
    """Python 2 pickled its strings as bytes."""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def read_pickle(where: str, content: bytes) -> dict[str, Any]:
    """The entries of a pickled dictionary that have names. Arrays come as `Array`, Python 2's strings as bytes.

    Args:
        where: what an error calls the file.
    """
    try:
        found = Unpickler(where, content).load()
    except DataError:
        raise
    except Exception as error:  # bytes that are no pickle can fail in any way at all
        raise DataError(
            f"{where} is no readable pickle ({error}): it is cut short or another file; download it again"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{where} holds a {type(found).__name__}, not the entries of a CIFAR file; download it again")
    return {as_text(key): value for key, value in found.items() if isinstance(key, (bytes, str))}
