"""Lightning callbacks of the user: found by name, checked before anything is written, saved with the run."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor

from psm.utils.errors import UserError, did_you_mean
from psm.utils.importing import import_object

log = logging.getLogger("psm")


def split_callbacks(callbacks: Any) -> tuple[list[str], list[lightning.Callback]]:
    """Separate names (``module.Class``), which are stored with the run, from instances, which are not."""
    items = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for item in items:
        if not isinstance(item, (str, lightning.Callback)):
            raise UserError(
                f"callbacks={item!r} is not a callback: give instances of lightning.Callback, or module.Class as text."
            )
    return [item for item in items if isinstance(item, str)], [item for item in items if not isinstance(item, str)]


def load_callbacks(names: Iterable[str]) -> list[lightning.Callback]:
    """Import each ``module.Class`` and create it without arguments."""
    return [_load_callback(name) for name in names]


def _load_callback(name: str) -> lightning.Callback:
    try:
        found = import_object(name)
    except ImportError as error:
        raise UserError(f"callbacks=[{name}] cannot be imported: {error}; give module.Class of a callback.") from None
    if not (isinstance(found, type) and issubclass(found, lightning.Callback)):
        raise UserError(f"callbacks=[{name}] is not a Lightning callback: name a subclass of lightning.Callback.")
    try:
        return found()
    except Exception as error:
        raise UserError(
            f"callbacks=[{name}] cannot be created without arguments ({' '.join(str(error).split())}): write a "
            "subclass that sets them, or give an instance from Python."
        ) from None


def check_callbacks(callbacks: Sequence[lightning.Callback], metrics: Collection[str], has_loggers: bool) -> None:
    """Refuse a callback that monitors what this run does not measure, or that needs a logger where there is none."""
    for callback in callbacks:
        kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in metrics:
            hint = did_you_mean(monitor, metrics)
            raise UserError(
                f"{kind} monitors {monitor!r}, which this run does not measure{hint}: choose one of "
                f"{', '.join(sorted(metrics))}."
            )
        if isinstance(callback, LearningRateMonitor) and not has_loggers:
            raise UserError(f"{kind} writes to a logger, and the run has none: give for example loggers=[csv].")


def plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states of callbacks that a checkpoint can hold: tensors and plain values, which load without unpickling."""
    for name, state in states.items():
        if not _is_plain(state):
            log.warning("The state of the callback %s is not saved: it holds more than tensors and plain values.", name)
    return {name: state for name, state in states.items() if _is_plain(state)}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)
