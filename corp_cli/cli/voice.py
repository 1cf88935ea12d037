"""What corp says as a process: one line on stderr for whatever ended it, and the exit code. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator

from corp_cli.errors import CorpError, GateError, Terminated, as_mistake
from corp_cli.runtime import ranks

# Errors of a write that do not say which file it was.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def usable_streams() -> None:
    """Let nothing that is printed end a run: closed streams lead nowhere, and what they cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        with contextlib.suppress(AttributeError):  # a stream that has been put in place of the real one
            getattr(sys, name).reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Of several processes, let the first alone print during the body."""
    with contextlib.ExitStack() as around:
        if not ranks.leads():
            nowhere = around.enter_context(open(os.devnull, "w", encoding="utf-8"))
            around.enter_context(contextlib.redirect_stdout(nowhere))
            around.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def say(message: str) -> None:
    """One line on stderr, if that is possible."""
    from corp_cli.runtime.console import give_up, printable

    try:
        print(f"corp: {printable(message)}", file=sys.stderr, flush=True)
    except OSError:
        give_up(sys.stderr)


def report(error: BaseException, where: str = "", hint: str = "") -> int:
    """Tell the user in one line on stderr what went wrong (and `where`), in another how to go on → the exit code."""
    if os.environ.get("CORP_DEBUG") == "1":
        traceback.print_exception(error)
    error = as_mistake(error)
    message = " ".join(str(error).split())
    known = isinstance(error, CorpError | GateError)
    if not known:
        advice = "set CORP_DEBUG=1 to see the traceback, and please report it"
        message = f"unexpected error: {type(error).__name__}: {message}; {advice}"
    if ranks.speaks():
        say(f"{where}{message}")
        ranks.leave_word(error, message)
    if hint:
        say(hint)
    return 1 if not known else 2 if isinstance(error, CorpError) else 3


def stopped(stop: KeyboardInterrupt) -> int:
    """Say that the run was stopped, and how to go on → the exit code."""
    terminated = isinstance(stop, Terminated)
    why = ", as torchrun does with all processes when one of them ends" if terminated and ranks.count() > 1 else ""
    if ranks.leads() and ranks.speaks():
        say(f"{'terminated' if terminated else 'interrupted'}{why}{f'; {stop}' if stop.args else '.'}")
    elif stop.args:
        say(str(stop))
    return 143 if terminated else 130


def unprinted(error: OSError | None = None) -> int:
    """Give up on stdout, which was to hold the result → the exit code."""
    from corp_cli.runtime.console import give_up

    give_up(sys.stdout)
    if error is not None:
        say(f"cannot write to stdout: {error.strerror}.")
    return 1
