"""Errors that are sentences: what was given, what is allowed, what to do."""

import signal
from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake of the user's. The command line prints it without a stack trace and exits with code 2."""


class Diverged(Exception):
    """The loss or the weights are no longer numbers. The last good checkpoint is intact."""


class ResourceError(Exception):
    """The disk is full, memory ran out or a folder is gone: no mistake, so the command line exits with code 1.

    Files that were complete before are intact, and nothing partial has a final name.
    """


class LostProcess(ResourceError):
    """Another process of the run has ended or cannot be reached."""


class Preempted(KeyboardInterrupt):
    """A signal ended the run after a whole step, with a checkpoint of that step."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like the one given, to stand behind it in a sentence, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
