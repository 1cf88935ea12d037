"""One command as a Hydra app: its config checked for every job, its folder held, its jobs run. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import hydra

from corp_cli.cli import hydra_app, saved, voice
from corp_cli.cli.compose import config_dir
from corp_cli.cli.handover import Runner, collect
from corp_cli.cli.help import help_text
from corp_cli.cli.job import Job, Task, working_in
from corp_cli.cli.messages import plain_errors
from corp_cli.errors import CorpError
from corp_cli.files.locks import sole_writer
from corp_cli.files.owned import claim, clear
from corp_cli.runtime import console, ranks


def run_command(command: str, args: Sequence[str]) -> int:
    """Run `corp <command> <args>` as a Hydra app, after checking the config of every job → the exit code."""
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
        if error.filename is None and error.errno not in voice.FULL:
            raise
        key = "hydra.sweep.dir" if ground.multirun else "hydra.run.dir"
        what = error.filename or "the output folder"
        raise CorpError(f"Cannot write {what}: {error.strerror}; choose another with {key}=FOLDER.") from error
    finally:
        for folder in [job.output_dir for job in jobs if job.unused] if jobs else [ground.folder]:
            hydra_app.remove_unused(folder, ground)
    if console.lost() and not ground.writes:
        voice.say("stdout, which was to hold the result, could not be written.")
        return 1
    return min((voice.report(job.error, job.where, job.hint) for job in jobs if job.error is not None), default=0)


def follow(ground: hydra_app.Ground, resumed: Path | None) -> int:
    """Take part in the run that the first process writes, and shows → the exit code."""
    from corp_cli.commands.prune import follow  # imports torch

    record = saved.read_record(ground.folder) if resumed else None
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


def run_jobs(command: str, ground: hydra_app.Ground, resumed: bool, jobs: list[Job]) -> None:
    """Let Hydra run what sys.argv asks for; `jobs` grows by each that ends, here or where a launcher runs it."""
    from corp_cli.cli import sweep  # and with it what reports hold, which help needs not wait for

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
