"""Methods as rows of parts, and how a configuration becomes one."""

from psm.methods import builtin as _builtin  # noqa: F401  the built-in rows
from psm.methods.registry import (
    METHODS,
    Method,
    find_method,
    get_method,
    list_methods,
    register_method,
    register_part,
    unregister_method,
)
from psm.methods.spec import KINDS, MethodSpec

__all__ = [
    "KINDS",
    "METHODS",
    "Method",
    "MethodSpec",
    "find_method",
    "get_method",
    "list_methods",
    "register_method",
    "register_part",
    "unregister_method",
]
