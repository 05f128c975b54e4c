"""Arguments as the commands share them."""

from collections.abc import Sequence


def with_positional(arguments: Sequence[str], name: str) -> Sequence[str]:
    """The arguments with a first one that is no key=value, as in `psm inspect runs/a`, as the value of a key."""
    first, *rest = arguments or [""]
    named = bool(first) and "=" not in first and not first.startswith("-")
    return [f"{name}={first}", *rest] if named else arguments
