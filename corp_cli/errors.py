"""The one exception a user sees: a plain sentence that says what is wrong and what to do."""


class CorpError(Exception):
    """A mistake in the user's input. The CLI prints its message and exits with code 2, without a traceback."""


class GateError(Exception):
    """A result is worse than `gate.*` allows. The CLI prints its message and exits with code 3; files stay."""
