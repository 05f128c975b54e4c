"""Where pictures come from. Every source ends as one store of uint8 pictures with labels for evaluation only."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.data.dataset import DataSet, Pictures
    from psm.data.factory import load

__all__ = ["DataSet", "Pictures", "load"]

_HOMES = {"load": "psm.data.factory", "DataSet": "psm.data.dataset", "Pictures": "psm.data.dataset"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the catalogue can be read without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
