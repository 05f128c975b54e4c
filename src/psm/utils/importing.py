"""Objects by their dotted name, for keys such as ``callbacks=[module.Class]``."""

import importlib
from typing import Any


def import_object(dotted: str) -> Any:
    """The object that ``module.name`` names.

    Raises ``ImportError`` if the module cannot be imported or has no such name; the message says which.
    """
    module, _, name = dotted.rpartition(".")
    if not module or not name:
        raise ImportError(f"{dotted!r} is not of the form module.Class")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"{module} has no {name}") from None
    except ImportError:
        raise
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ImportError(f"{module} raises {type(error).__name__}: {error}") from None
