"""The one error that a user can cause: a sentence saying what was given, what is allowed and what to do."""


class UserError(Exception):
    """A mistake of the user's. The command line prints it without a stack trace and exits with code 2."""
