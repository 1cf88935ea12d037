"""One job of a command: what Hydra calls, and what came of it. Imports no torch before the work begins."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from corp_cli.cli import log, saved
from corp_cli.cli.compose import composer, typed
from corp_cli.cli.table import COMMANDS
from corp_cli.errors import CorpError, GateError, as_mistake, stop_within
from corp_cli.files.locks import sole_writer
from corp_cli.files.owned import is_own
from corp_cli.runtime import console

BESIDE = "sympy"  # which PyTorch imports, and which needs none of it: 400 files, from disks that may be slow
Value = float | tuple[float, ...] | None  # what objective= asks for


@dataclass(frozen=True)
class Task:
    """What all jobs of a command line have in common."""

    command: str
    multirun: bool
    resumed: bool
    shared: (
        Path | None
    )  # a folder of all jobs of a multirun; corp prune keeps there what it measures of the dense model


@dataclass(frozen=True)
class Job:
    """One job, and when it is done what came of it."""

    number: int
    overrides: str
    output_dir: Path
    where: str  # for its messages: which job of a multirun it is
    dry: bool
    error: BaseException | None = None
    value: Value = None  # for the sweeper

    @property
    def failed(self) -> bool:
        """Whether it has no result; one that is worse than gate.* allows has."""
        return self.error is not None and not isinstance(self.error, GateError)

    @property
    def said(self) -> str | None:
        """The error as one line."""
        return None if self.error is None else " ".join(str(self.error).split()) or type(self.error).__name__

    @property
    def hint(self) -> str:
        """How to go on where the job broke off; empty where it left nothing."""
        return saved.hint(self.output_dir) if self.failed else ""

    @property
    def unused(self) -> bool:
        """Whether its folder is of no use to anyone; a bug leaves all that may help to find it."""
        return self.dry or (isinstance(self.error, CorpError | KeyboardInterrupt) and not self.hint)


def carry_out(task: Task, cfg: DictConfig, begins: Callable[[Job], None] | None = None) -> Job:
    """Do the work of one job, of which `cfg` is the composed config; errors are in what is returned.

    begins: is told of the job when nobody else can write to its folder.
    """
    here = HydraConfig.get()
    overrides, prunes = " ".join(here.overrides.task), task.command == "prune"
    number = here.job.num if task.multirun else 0
    where = f"job {number} ({overrides}): " if task.multirun else ""
    dry = task.command in ("prune", "study") and cfg.dry_run
    job = Job(number, overrides, Path(here.runtime.output_dir), where, dry)
    if task.multirun:
        console.out().print(f"corp: {where}{'' if job.dry else job.output_dir}".rstrip(), markup=False)
    began = Path(here.runtime.cwd)
    try:
        with contextlib.ExitStack() as around:
            if task.multirun and not job.dry:  # of whose folder alone this command is the sole writer
                around.enter_context(sole_writer(job.output_dir))
            if begins is not None:
                begins(job)
            around.enter_context(log.recorded(task.command, overrides, job.output_dir))
            if prunes and not job.dry and (task.resumed or here.output_subdir == saved.SAVED):
                began = around.enter_context(saved.recorded(job.output_dir, cfg, began, task.resumed))
            around.enter_context(working_in(began))
            more: list[Any] = [task.shared] if prunes and task.shared is not None and is_own(task.shared) else []
            if task.command == "study":
                more = [composer(here.overrides.task)]
            value = loaded(task.command).run(typed(cfg, COMMANDS[task.command].schema), job.output_dir, *more)
    except (Exception, KeyboardInterrupt) as error:
        return replace(job, error=stop_within(error) or as_mistake(error))
    return replace(job, value=value)


def import_beside() -> None:
    """Import BESIDE, if it is there."""
    with contextlib.suppress(Exception):  # if that is in the way of PyTorch too, it says so
        import_module(BESIDE)


def loaded(command: str) -> ModuleType:
    """`corp_cli.commands.<command>`; the first one brings PyTorch along, which takes seconds to load."""
    name, collects = f"corp_cli.commands.{command}", gc.isenabled()
    if name in sys.modules:
        return sys.modules[name]
    with console.busy("starting"):
        gc.disable()  # all that modules hold is in use: to look through it, now and at the end, takes two seconds more
        Thread(target=import_beside, daemon=True).start()
        try:
            return import_module(name)
        finally:
            gc.freeze()
            if collects:
                gc.enable()


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let relative paths begin in `folder`, if that is still there."""
    before = os.getcwd()
    if folder.is_dir():
        os.chdir(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # where it was removed in the meantime
            os.chdir(before)
