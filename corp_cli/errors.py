"""The one exception a user sees: a plain sentence that says what is wrong and what to do. And how a run is stopped."""

from __future__ import annotations

import errno

NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)


class CorpError(Exception):
    """A mistake in the user's input. The CLI prints its message and exits with code 2, without a traceback."""


class GateError(Exception):
    """A result is worse than `gate.*` allows. The CLI prints its message and exits with code 3; files stay."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, from Slurm, Kubernetes or `kill`: what holds for Ctrl-C holds for it. The CLI exits with code 143."""


def causes(error: BaseException) -> list[BaseException]:
    """`error` and what it came of, down to the first; each once, since a library may raise an error from itself."""
    found: list[BaseException] = []
    below: BaseException | None = error
    while below is not None and not any(below is one for one in found):
        found.append(below)
        below = below.__cause__ or below.__context__
    return found


def stop_within(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C or SIGTERM that `error` is or came of: native code turns it into errors of its own."""
    return next((one for one in causes(error) if isinstance(one, KeyboardInterrupt)), None)


def as_mistake(error: BaseException) -> BaseException:
    """`error`, or a CorpError where the system says that a file cannot have the name that it was given."""
    if isinstance(error, OSError) and error.errno in NO_NAME and error.filename:
        return CorpError(f"{error.filename} is no name of a file ({error.strerror}); give another.")
    return error
