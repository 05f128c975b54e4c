"""Names and keys that have changed: what was written still works for one minor version, and a warning says so."""

import warnings


class RenamedWarning(FutureWarning):
    """Something still works under its former name. Shown to users by default, once for each place and name."""


def warn_renamed(old: str, new: str, until: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is now ``new``.

    Args:
        old: what was written: a key, a function, an argument.
        new: what to write instead.
        until: the version in which ``old`` no longer works.
        stacklevel: frames between this call and the line to blame, as `warnings.warn` counts them.
    """
    warnings.warn(f"{old} is now {new}; the former name works until version {until}.", RenamedWarning, stacklevel)
