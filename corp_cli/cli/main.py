"""The command line: argv → Hydra → command. Imports no torch: completion and --help answer at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from difflib import get_close_matches
from typing import Iterator, NoReturn, Sequence

from corp_cli.cli import voice
from corp_cli.cli.table import COMMANDS
from corp_cli.errors import CorpError, Terminated, stop_within
from corp_cli.runtime import ranks
from corp_cli.version import __version__

OVERVIEW = """\
corp makes trained vision transformers smaller and faster in one shot, from a folder of unlabelled images.

Usage: corp COMMAND [group=choice] [key=value] [flags]

Commands:
{commands}

Examples:
  corp prune                                                 the bundled digit classifier, offline
  corp prune model=deit_tiny calibration.path=photos         a timm model and your own images
  corp prune -m sparsity.joint=0.25,0.5,0.75                 one run per value
  corp bench checkpoint=FILE                                 what the pruning gained in speed
  corp export checkpoint=FILE                                an ONNX file, which needs no corp
  corp push OWNER/NAME checkpoint=FILE                       share it on the Hugging Face hub
  corp check report.json --against baseline.json             fail where a result is worse than another
  corp summary outputs                                       all runs below a folder side by side
  corp report outputs                                        the same as a page with charts
  corp analyze model=deit_tiny calibration.path=photos       how redundant every block is
  corp study experiment=table1                               a table of the paper again, on any model
  corp info checkpoint=FILE                                  the pruned.safetensors of a run
  corp doctor                                                whether corp can work on this machine

Every command explains itself: corp prune --help
Exit codes: 0 done, 1 a bug, 2 a mistake in the input, 3 a result worse than gate.* allows, 130 interrupted,
  143 terminated
Shell completion: eval "$(corp -sc install=bash)", the same with zsh, or corp -sc install=fish | source
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `corp <argv>` → its exit code: 0, 1 for a bug, 2 for a mistake in the input, 3 for a result that is worse
    than `gate.*` allows, 130 for Ctrl-C, 143 for SIGTERM."""
    voice.usable_streams()
    try:
        with terminable():
            ranks.start()
            with voice.one_voice():
                code = dispatch(list(sys.argv[1:] if argv is None else argv))
                sys.stdout.flush()
            if code == 0:
                ranks.stop()
            return code
    except KeyboardInterrupt as stop:
        return voice.stopped(stop)
    except BrokenPipeError:  # the reader (head, less) has left
        return voice.unprinted()
    except OSError as error:
        return voice.unprinted(error) if error.errno in voice.FULL and error.filename is None else voice.report(error)
    except Exception as error:
        came_of = stop_within(error)
        return voice.stopped(came_of) if came_of else voice.report(error)


def program() -> NoReturn:
    """`corp` as a process of its own."""
    code = main()
    # That read images still, or wait for other processes: native code ends badly while Python takes itself apart.
    if threading.active_count() > 1 or ranks.count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated during the body, but where a program around this one deals with it."""

    def terminate(*_: object) -> None:
        raise Terminated

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def dispatch(argv: list[str]) -> int:
    """Do what `argv` asks for and return the exit code; errors are raised."""
    if not argv or argv[0] in ("-h", "--help"):
        print(OVERVIEW.format(commands="\n".join(f"  {name:<10}{one.does}" for name, one in COMMANDS.items())), end="")
        return 0
    if "--version" in argv:
        print(f"corp {__version__}")
        return 0
    for flag in {"-sc", "--shell-completion"}.intersection(argv):
        from corp_cli.cli.completion import shell_completion

        print(shell_completion("".join(argv[argv.index(flag) + 1 :][:1]), list(COMMANDS)))
        return 0
    command, *args = argv
    if command in COMMANDS:
        from corp_cli.cli.run import run_command  # imports Hydra

        return run_command(command, [at_home(arg) for arg in args])
    known = ", ".join(COMMANDS)
    if command.startswith("-") or "=" in command:
        raise CorpError(f"{command} must follow a command, as in corp prune {command}; there are {known}.")
    near = get_close_matches(command, COMMANDS, n=1)
    raise CorpError(f"There is no command {command}, only {known}" + (f"; did you mean {near[0]}?" if near else "."))


def at_home(arg: str) -> str:
    """`key=~/path` with the home folder in place of ~, which shells leave alone there and Hydra cannot read."""
    key, equals, value = arg.partition("=")
    return f"{key}={os.path.expanduser(value)}" if equals and value.startswith("~/") else arg
