"""Read CIFAR's pickles without running any code in them.

A pickle is a program. This reader lets it build plain containers, numbers, text and bytes, and answers the few names
that a pickled numpy array needs with stand-ins of its own: numpy itself never sees the file until its type, shape and
length have been checked. Every other name is refused before it is imported. The interpreter is Python's own written
in Python, since the one in C allocates whatever sizes a file claims.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from psm.utils.errors import UserError

_MOST_BYTES = 1_000_000_000
_TYPES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "b1", "f4", "f8"}


def read(path: Path) -> Any:
    """The content of a pickle, or a UserError if it is not plain data alone."""
    if path.stat().st_size > _MOST_BYTES:
        raise UserError(
            f"{path} is larger than {_MOST_BYTES // 10**9} GB, which no published CIFAR file is; replace it."
        )
    data = path.read_bytes()
    try:
        return _Reader(data).load()
    except EOFError:
        reason = "it ends too early"
    except Exception as error:  # a hostile or broken file may fail anywhere in the interpreter
        reason = str(error) or type(error).__name__
    raise UserError(f"{path} was refused, it is no sound CIFAR pickle ({reason}); replace it by the published file.")


def as_array(value: Any) -> np.ndarray | None:
    """The array that a value of ``read`` represents, or None."""
    value = getattr(value, "_values", value) if isinstance(value, _Array) else value
    return value if isinstance(value, np.ndarray) else None


class _Name:
    """A name that the pickle may call. Sealed: a pickle can set the state of whatever it holds, but not of this."""

    __slots__ = ("_call",)

    def __init__(self, call: Any):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes the reader")


class _Type:
    """Stands in for numpy.dtype: a kind and width from a short list, and a byte order."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *flags: Any):
        self._code, self._order = _text(code).lstrip("<>|="), "<"
        if self._code not in _TYPES:
            raise pickle.UnpicklingError(f"it holds an array of type {_text(code)[:20]}")

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array of unknown byte order")
        self._order = "<" if order in "|=" else order

    def numpy(self) -> np.dtype:
        return np.dtype(self._order + self._code)


class _Array:
    """Stands in for numpy.ndarray: records what it is given, and becomes an array when all of it fits together."""

    __slots__ = ("_values",)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, raw = state
        self._values = _array(raw, dtype, shape, "F" if by_columns else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _Type) or not isinstance(raw, (bytes, bytearray)) or not isinstance(shape, tuple):
        raise pickle.UnpicklingError("it holds an array of something other than numbers")
    kind = dtype.numpy()
    if not all(type(side) is int and side >= 0 for side in shape) or math.prod(shape) * kind.itemsize != len(raw):
        raise pickle.UnpicklingError("it holds an array whose shape and length disagree")
    return np.frombuffer(raw, dtype=kind).reshape(shape, order="F" if order == "F" else "C")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("ascii")
    if not isinstance(value, str):
        raise pickle.UnpicklingError("it holds an array of unknown type")
    return value


class _Reader(pickle._Unpickler):
    """The interpreter, with the names that it may look up. ``encoding`` keeps Python 2's text as bytes."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._budget = len(data)
        self._names = {"ndarray": _Name(None), "dtype": _Name(_Type), "encode": _Name(self._encode)}
        self._names |= {"_reconstruct": _Name(lambda *_: _Array()), "scalar": _Name(self._scalar)}
        self._names |= {"_frombuffer": _Name(_array)}

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core.", "numpy._core."), name) in _ALLOWED:
            return self._names[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:120])

    def persistent_load(self, identity: Any) -> Any:
        raise pickle.UnpicklingError("it refers to things outside itself")

    def _encode(self, text: str, encoding: str) -> bytes:
        """Python 3's way of writing bytes in old pickles. No file can hold more of them than its own length."""
        if _text(encoding) not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("it encodes text in an unusual way")
        self._budget -= len(text)
        if self._budget < 0:
            raise pickle.UnpicklingError("it grows when read")
        return text.encode("latin1")

    def _scalar(self, dtype: Any, raw: Any) -> Any:
        return _array(raw, dtype, (), "C").item()


_ALLOWED = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
