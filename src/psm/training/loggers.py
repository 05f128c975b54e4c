"""Lightning loggers from the ``loggers`` key: by short name or as module.Class, with their arguments."""

import inspect
from collections.abc import Iterator, Mapping
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


def _arguments_by_name(loggers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``{name: arguments}``, from a mapping that may be nested or dotted in any way.

    ``loggers.my.module.Class.x=1`` does not say where the name ends: it is the first part if that is a short name, else
    as many parts as name something that can be imported.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, value in _leaves(loggers):
        end = _name_length(path)
        name, rest = ".".join(path[:end]), path[end:]
        arguments = found.setdefault(name, {})
        if value is None and not rest:
            continue
        if not rest:
            raise UserError(
                f"loggers.{name}={value} is not an argument of a logger: write loggers.NAME.ARGUMENT=VALUE."
            )
        for part in rest[:-1]:
            arguments = arguments.setdefault(part, {})
        arguments[rest[-1]] = value
    return found


def _leaves(nested: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every entry; None is the value of a name without arguments."""
    for key, value in nested.items():
        path = (*prefix, *str(key).split("."))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, None if isinstance(value, Mapping) else value


def _name_length(path: tuple[str, ...]) -> int:
    if path[0] in LOGGERS:
        return 1
    ends = (end for end in range(2, len(path) + 1) if _exists(".".join(path[:end])))
    return next(ends, len(path))


def _exists(dotted: str) -> bool:
    try:
        return callable(import_object(dotted))
    except ImportError:
        return False
