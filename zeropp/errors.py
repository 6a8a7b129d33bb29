"""The one exception for mistakes a person can mend: bad flags, bad files, bad configurations."""


class InputError(ValueError):
    """Says what was given, what was expected and what to do; shown without a traceback."""
