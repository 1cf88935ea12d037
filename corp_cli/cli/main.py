"""The command line: argv → Hydra → command. Imports no torch: completion and --help answer at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
import threading
import traceback
from difflib import get_close_matches
from typing import TYPE_CHECKING, Iterator, NoReturn, Sequence

from corp_cli.cli.table import COMMANDS
from corp_cli.errors import CorpError, GateError, Terminated, as_mistake, stop_within
from corp_cli.runtime import ranks
from corp_cli.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from corp_cli.cli.hydra_app import Ground
    from corp_cli.cli.job import Job

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
    usable_streams()
    try:
        with terminable():
            ranks.start()
            with one_voice():
                code = dispatch(list(sys.argv[1:] if argv is None else argv))
                sys.stdout.flush()
            if code == 0:
                ranks.stop()
            return code
    except KeyboardInterrupt as stop:
        return stopped(stop)
    except BrokenPipeError:  # the reader (head, less) has left
        return unprinted()
    except OSError as error:
        return unprinted(error) if error.errno in FULL and error.filename is None else report(error)
    except Exception as error:
        came_of = stop_within(error)
        return stopped(came_of) if came_of else report(error)


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
def one_voice() -> Iterator[None]:
    """Of several processes, let the first alone print during the body."""
    with contextlib.ExitStack() as around:
        if not ranks.leads():
            nowhere = around.enter_context(open(os.devnull, "w", encoding="utf-8"))
            around.enter_context(contextlib.redirect_stdout(nowhere))
            around.enter_context(contextlib.redirect_stderr(nowhere))
        yield


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


def stopped(stop: KeyboardInterrupt) -> int:
    """Say that the run was stopped, and how to go on → the exit code."""
    terminated = isinstance(stop, Terminated)
    why = ", as torchrun does with all processes when one of them ends" if terminated and ranks.count() > 1 else ""
    if ranks.leads() and ranks.speaks():
        say(f"{'terminated' if terminated else 'interrupted'}{why}{f'; {stop}' if stop.args else '.'}")
    elif stop.args:
        say(str(stop))
    return 143 if terminated else 130


def usable_streams() -> None:
    """Let nothing that is printed end a run: closed streams lead nowhere, and what they cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        with contextlib.suppress(AttributeError):  # a stream that has been put in place of the real one
            getattr(sys, name).reconfigure(errors="backslashreplace")


def unprinted(error: OSError | None = None) -> int:
    """Give up on stdout, which was to hold the result → the exit code."""
    from corp_cli.runtime.console import give_up

    give_up(sys.stdout)
    if error is not None:
        say(f"cannot write to stdout: {error.strerror}.")
    return 1


def say(message: str) -> None:
    """One line on stderr, if that is possible."""
    from corp_cli.runtime.console import give_up, printable

    try:
        print(f"corp: {printable(message)}", file=sys.stderr, flush=True)
    except OSError:
        give_up(sys.stderr)


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


# Errors of a write that do not say which file it was.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_command(command: str, args: Sequence[str]) -> int:
    """Run `corp <command> <args>` as a Hydra app, after checking the config of every job → the exit code."""
    from corp_cli.cli import hydra_app, saved
    from corp_cli.cli.messages import plain_errors
    from corp_cli.files.locks import sole_writer
    from corp_cli.runtime import console

    console.lost()
    require_place()
    if command in hydra_app.DRY:
        args = hydra_app.dry(args)
    if command in hydra_app.BARE:
        args = hydra_app.spelled_out(command, args)
    flags = hydra_app.parse_flags(command, args)
    resumed = saved.resume(flags) if command == "prune" else None
    config = resumed or saved.take_config(flags)
    loader = hydra_app.config_loader(flags.config_dir)
    if config is not None:
        saved.lay_over(command, config, flags, loader)
    if flags.help:
        from corp_cli.cli.help import help_text

        print(help_text(command, flags, loader))
        return 0
    ground = hydra_app.check(command, flags, loader)
    if ranks.count() > 1:
        if command != "prune" or ground.multirun or not ground.writes:
            what = "a sweep" if ground.multirun else "that" if command == "prune" else f"corp {command}"
            raise CorpError(
                f"Several processes are for one run of corp prune, not for {what}; start it without torchrun."
            )
        if not ranks.leads():
            return follow(ground, resumed)
    jobs: list[Job] = []
    try:
        alone = sole_writer(ground.folder) if ground.writes else contextlib.nullcontext()
        with alone, hydra_app.command_line(flags), plain_errors(command, flags.overrides, loader):
            run_jobs(command, ground, resumed is not None, jobs)
    except SystemExit as stop:  # after --hydra-help
        return int(stop.code or 0)
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        key = "hydra.sweep.dir" if ground.multirun else "hydra.run.dir"
        what = error.filename or "the output folder"
        raise CorpError(f"Cannot write {what}: {error.strerror}; choose another with {key}=FOLDER.") from error
    finally:
        for folder in [job.output_dir for job in jobs if job.unused] if jobs else [ground.folder]:
            hydra_app.remove_unused(folder, ground)
    if console.lost() and not ground.writes:
        say("stdout, which was to hold the result, could not be written.")
        return 1
    return min((report(job.error, job.where, job.hint) for job in jobs if job.error is not None), default=0)


def follow(ground: Ground, resumed: Path | None) -> int:
    """Take part in the run that the first process writes, and shows → the exit code."""
    from pathlib import Path

    from corp_cli.cli.job import working_in
    from corp_cli.cli.saved import read_record
    from corp_cli.commands.prune import follow

    record = read_record(ground.folder) if resumed else None
    with contextlib.ExitStack() as around:
        if record:
            around.enter_context(working_in(Path(record.folder)))
        follow(ground.asked)
    return 0


def require_place() -> None:
    """Raise CorpError where the folder that relative paths begin in is there no more."""
    try:
        os.getcwd()
    except OSError as error:
        raise CorpError("The current folder is there no more; change to another with cd, and try again.") from error


def run_jobs(command: str, ground: Ground, resumed: bool, jobs: list[Job]) -> None:
    """Let Hydra run what sys.argv asks for; `jobs` grows by each that ends, here or where a launcher runs it."""
    import hydra

    from corp_cli.cli import sweep
    from corp_cli.cli.compose import config_dir
    from corp_cli.cli.handover import Runner, collect
    from corp_cli.cli.job import Task
    from corp_cli.files.owned import claim, clear
    from corp_cli.runtime import console

    shared = claim(ground.folder / sweep.CACHE) if ground.multirun else None
    runner = Runner(Task(command, ground.multirun, resumed, shared), jobs)
    try:
        try:
            hydra.main(version_base="1.3", config_path=str(config_dir().resolve()), config_name=command)(runner)()
        finally:
            ended, going_on = collect(shared) if shared is not None else ([], [])
            jobs.extend(ended)
            jobs.sort(key=lambda job: job.number)
            if shared is not None and not going_on:
                clear(shared)
            if ground.multirun and command == "prune":
                sweep.conclude([job for job in jobs if not job.dry], ground.folder)
    except Exception as error:  # of a launcher that gives up when one process dies, or of a sweeper without results
        if not any(job.failed for job in jobs):
            raise
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        rest = f"; where jobs go on, corp summary {shlex.quote(str(ground.folder))} collects them later"
        console.warn(f"the sweep ended early: {first_line.rstrip('.')}{rest if going_on else ''}.")
