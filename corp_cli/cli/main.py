"""The command line: argv → Hydra → command. Imports no torch: completion and --help answer at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

from corp_cli.errors import CorpError, GateError
from corp_cli.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from corp_cli.config.gate import CheckConfig
    from corp_cli.config.prune import BenchConfig, DoctorConfig, EvaluateConfig, ExportConfig, InfoConfig, PruneConfig

COMMANDS = {
    "prune": "prune a vision transformer in one shot, from a folder of unlabelled images",
    "evaluate": "measure the accuracy of a checkpoint, and how close it is to its dense model",
    "bench": "time a pruned checkpoint against its dense model on this machine",
    "export": "write a checkpoint as ONNX, torch.export or TorchScript, and compare it with the model",
    "check": "compare a report with a baseline, and fail where it is worse",
    "info": "describe a pruned checkpoint",
    "doctor": "look whether corp can work on this machine, and say what to do where not",
}
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
  corp check report.json --against baseline.json             fail where a result is worse than another
  corp info checkpoint=FILE                                  the pruned.safetensors of a run
  corp doctor                                                whether corp can work on this machine

Every command explains itself: corp prune --help
Exit codes: 0 done, 1 a bug, 2 a mistake in the input, 3 a result worse than gate.* allows, 130 interrupted
Shell completion: eval "$(corp -sc install=bash)", the same with zsh, or corp -sc install=fish | source
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `corp <argv>` → its exit code: 0, 1 for a bug, 2 for a mistake in the input, 3 for a result that is worse
    than `gate.*` allows, 130 for Ctrl-C."""
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"corp: interrupted{f'; {stop}' if stop.args else '.'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left. Without this, Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return report(error)


def dispatch(argv: list[str]) -> int:
    """Do what `argv` asks for and return the exit code; errors are raised."""
    if not argv or argv[0] in ("-h", "--help"):
        print(
            OVERVIEW.format(commands="\n".join(f"  {name:<10}{does}" for name, does in COMMANDS.items())),
            end="",
        )
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


def report(error: Exception, where: str = "") -> int:
    """Tell the user in one line on stderr what went wrong (and `where`), and return the exit code."""
    if os.environ.get("CORP_DEBUG") == "1":
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, CorpError | GateError):
        print(f"corp: {where}{message}", file=sys.stderr)
        return 2 if isinstance(error, CorpError) else 3
    advice = "set CORP_DEBUG=1 to see the traceback, and please report it"
    print(f"corp: {where}unexpected error: {type(error).__name__}: {message}; {advice}", file=sys.stderr)
    return 1


def run_prune(config: PruneConfig, output_dir: Path) -> None:
    """The job of `corp prune`."""
    if config.dry_run:
        from corp_cli.commands import dry_run

        return dry_run.run(config)
    from corp_cli.cli import sweep
    from corp_cli.commands import prune

    prune.run(config, output_dir, sweep.shared_cache())


def run_evaluate(config: EvaluateConfig, output_dir: Path) -> None:
    """The job of `corp evaluate`."""
    from corp_cli.commands import evaluate

    evaluate.run(config, output_dir)


def run_bench(config: BenchConfig, output_dir: Path) -> None:
    """The job of `corp bench`."""
    from corp_cli.commands import bench

    bench.run(config, output_dir)


def run_export(config: ExportConfig, output_dir: Path) -> None:
    """The job of `corp export`."""
    from corp_cli.commands import export

    export.run(config, output_dir)


def run_check(config: CheckConfig, output_dir: Path) -> None:
    """The job of `corp check`; it writes nothing to `output_dir`."""
    from corp_cli.commands import check

    check.run(config)


def run_info(config: InfoConfig, output_dir: Path) -> None:
    """The job of `corp info`; it writes nothing to `output_dir`."""
    from corp_cli.commands import info

    info.describe(str(config.checkpoint))


def run_doctor(config: DoctorConfig, output_dir: Path) -> None:
    """The job of `corp doctor`; it writes nothing to `output_dir`."""
    from corp_cli.commands import doctor

    doctor.run()


JOBS: dict[str, Callable[[Any, Path], None]] = {
    "prune": run_prune,
    "evaluate": run_evaluate,
    "bench": run_bench,
    "export": run_export,
    "check": run_check,
    "info": run_info,
    "doctor": run_doctor,
}
# Errors of a write that do not say which file it was.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(command: str, args: Sequence[str]) -> int:
    """Run `corp <command> <args>` as a Hydra app, after checking the config of every job → the exit code."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from corp_cli.cli import hydra_app, log, sweep
    from corp_cli.cli.compose import config_dir, typed
    from corp_cli.cli.messages import plain_errors
    from corp_cli.config.prune import SCHEMAS

    if command == "check":
        args = hydra_app.spelled_out(args)
    if command == "prune":
        args = hydra_app.resumed(hydra_app.dry(args))
    flags = hydra_app.parse_flags(command, args)
    loader = hydra_app.config_loader(flags.config_dir)
    hydra_app.lay_over(command, flags, loader)
    if flags.help:
        from corp_cli.cli.help import help_text

        print(help_text(command, flags, loader))
        return 0
    multirun, kept = hydra_app.check(command, flags, loader)
    failures: list[tuple[Exception, str]] = []
    unused: set[Path] = set()
    done: list[sweep.Job] = []
    sweep_dir = Path()
    process = os.getpid()

    def job(cfg: DictConfig) -> None:
        nonlocal sweep_dir
        here = HydraConfig.get()
        output_dir = Path(here.runtime.output_dir)
        where, number, overrides = "", 0, " ".join(here.overrides.task)
        dry = command == "prune" and cfg.dry_run
        if multirun:
            number, sweep_dir = here.job.num, Path(here.sweep.dir).absolute()
            where = f"job {number} ({overrides}): "
            print(f"corp: {where}{'' if dry else output_dir}".rstrip(), flush=True)
        try:
            with log.recorded(command, overrides, output_dir):
                JOBS[command](typed(cfg, SCHEMAS[command]), output_dir)
        except (Exception, KeyboardInterrupt) as error:
            kept_state = isinstance(error, KeyboardInterrupt) and hydra_app.holds_state(output_dir)
            if isinstance(error, (CorpError, KeyboardInterrupt)) and not kept_state:
                unused.add(output_dir)
            # Hydra prints lines of its own about an error that reaches it. In the processes of a launcher plugin
            # it has to: they do not share `failures`.
            if kept_state:
                raise KeyboardInterrupt(f"go on with: corp prune resume={shlex.quote(str(output_dir))}") from None
            if isinstance(error, KeyboardInterrupt) or os.getpid() != process:
                raise
            failures.append((error, where))
            worse = isinstance(error, GateError)
            done.append(sweep.Job(number, overrides, output_dir, " ".join(str(error).split()), worse))
        else:
            if dry:
                unused.add(output_dir)
            else:
                done.append(sweep.Job(number, overrides, output_dir))

    app = hydra.main(version_base="1.3", config_path=str(config_dir().resolve()), config_name=command)(job)
    try:
        with plain_errors(command, flags.overrides, loader), hydra_app.command_line(flags, args):
            app()
        if multirun and command == "prune" and done:
            sweep.conclude(done, sweep_dir)
    except SystemExit as stop:  # after --hydra-help
        return int(stop.code or 0)
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
        what = error.filename or "the output folder"
        raise CorpError(f"Cannot write {what}: {error.strerror}; choose another with {key}=FOLDER.") from error
    finally:
        if multirun:
            sweep.remove_cache(sweep_dir)
        for output_dir in unused:
            hydra_app.remove_unused(output_dir, kept)
    return min((report(*failure) for failure in failures), default=0)
