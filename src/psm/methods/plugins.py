"""A user's file or module that registers parts and methods.

Plugins are code, so they run only when the user names them in a call (``plugins=``), never because a downloaded run or
configuration says so. What a run was trained with is recorded with it, and named where it is missing.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from psm.utils.errors import UserError


def load_plugins(plugins: Iterable[str]) -> list[str]:
    """Import each plugin once; gives their names as a run records them (files by their full path)."""
    return [_load(str(plugin)) for plugin in plugins]


def _load(plugin: str) -> str:
    path = Path(plugin).expanduser()
    if path.suffix == ".py" or path.exists():
        return _load_file(path, plugin)
    try:
        importlib.import_module(plugin)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"plugins={plugin} cannot be imported: {_reason(error)}; give a module or a .py file."
        ) from None
    return plugin


def _load_file(path: Path, plugin: str) -> str:
    if not path.is_file():
        raise UserError(f"plugins={plugin} does not exist: give a Python file or a module.")
    path = path.resolve()
    name = f"psm_plugin_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"plugins={plugin} is not a Python file: its name must end in .py.")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        del sys.modules[name]
        raise UserError(f"plugins={plugin}: {error}") from None
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"plugins={plugin} cannot be imported: {_reason(error)}.") from None
    return str(path)


def missing_plugins(error: UserError, recorded: Iterable[str]) -> UserError:
    """The error of an unknown part or method, with the plugins that the run was trained with."""
    names = list(recorded)
    if not names:
        return error
    given = ",".join(names)
    return UserError(f"{error} The run was trained with plugins=[{given}]: give plugins=[{given}] with the command.")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
