"""Errors that are sentences: what was given, what is allowed, what to do."""


class UserError(Exception):
    """A mistake of the user's. The command line prints it without a stack trace and exits with code 2."""


class Diverged(Exception):
    """The loss or the weights are no longer numbers. The last good checkpoint is intact."""
