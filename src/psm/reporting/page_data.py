"""Data inside of a page: JSON that cannot end its script element, and arrays as bytes in base64."""

import base64
import json
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import Tensor

MAX_PAGE_BYTES = 20_000_000
SCALE = 10_000  # similarities, weights and shares are stored as integers of this unit
MISSING = -32_768  # NaN


def embedded_json(content: dict[str, Any]) -> Markup:
    """JSON that is safe inside a script element: no text in it can end the element."""
    return Markup(json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def to_fixed_point(values: Tensor) -> Tensor:
    """Numbers from -1 to 1 as integers of 1 / SCALE; NaN as MISSING."""
    return (values * SCALE).round().nan_to_num(MISSING)


def pack_array(values: Tensor, kind: str) -> dict[str, Any]:
    """An array as little-endian bytes in base64."""
    array = values.numpy().astype(np.dtype(kind).newbyteorder("<"))
    return {"kind": kind, "shape": list(array.shape), "bytes": base64.b64encode(array.tobytes()).decode()}
