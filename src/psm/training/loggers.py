"""Lightning loggers from the ``loggers`` key: by short name or as module.Class, with their arguments."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psm.utils.errors import UserError, did_you_mean
from psm.utils.importing import import_object

LOGGERS = {
    "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger",
    "csv": "lightning.pytorch.loggers.CSVLogger",
    "wandb": "lightning.pytorch.loggers.WandbLogger",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
}


def build_loggers(loggers: Mapping[str, Any], folder: Path) -> list[Any]:
    """Create every logger of ``{name: arguments}``, writing into ``folder`` unless its arguments say otherwise."""
    return [_build(name, arguments, folder) for name, arguments in _arguments_by_name(loggers).items()]


def _build(name: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    dotted = LOGGERS.get(name, name)
    if "." not in dotted:
        hint = did_you_mean(name, LOGGERS)
        raise UserError(f"loggers=[{name}] is unknown{hint}: choose from {', '.join(LOGGERS)} or give module.Class.")
    try:
        kind = import_object(dotted)
        accepted = inspect.signature(kind).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        default = {"save_dir": str(folder)} if takes_any or "save_dir" in accepted else {}
        return kind(**default | dict(arguments))
    except Exception as error:  # whatever the logger's package raises is for the user to mend
        raise UserError(f"loggers=[{name}] cannot be used: {' '.join(str(error).split())}") from None


def _arguments_by_name(loggers: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """``{name: arguments}`` with module.Class names in one piece.

    ``loggers.my.module.Class.x=1`` arrives nested ({"my": {"module": {"Class": {"x": 1}}}}): descend until the path
    names something that exists.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in loggers.items():
        name = f"{prefix}{key}"
        arguments = {} if value is None else value
        if not isinstance(arguments, Mapping):
            raise UserError(
                f"loggers.{name}={value} is not an argument of a logger: write loggers.NAME.ARGUMENT=VALUE."
            )
        inner = [item for item in arguments.values() if isinstance(item, Mapping)]
        if inner and len(inner) == len(arguments) and name not in LOGGERS and not _exists(name):
            nested = _arguments_by_name(arguments, f"{name}.")
        else:
            nested = {name: dict(arguments)}
        for dotted, options in nested.items():
            found[dotted] = found.get(dotted, {}) | options
    return found


def _exists(dotted: str) -> bool:
    try:
        return callable(import_object(dotted))
    except ImportError:
        return False
