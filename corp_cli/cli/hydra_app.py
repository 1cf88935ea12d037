"""What surrounds Hydra when it runs a command: flags, configs, the check before and the clean-up after."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Sequence

from hydra import version
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from corp_cli.cli import meant
from corp_cli.cli.compose import config_dir, open_args, register, typed
from corp_cli.cli.hydra_private import args_parser, keys_of_choice, make_loader, sweep_jobs
from corp_cli.cli.messages import keys_of, plain_errors
from corp_cli.cli.plugins import require_objective
from corp_cli.cli.table import COMMANDS
from corp_cli.errors import CorpError
from corp_cli.files.output import require_room

# command → the key of the word that needs none; corp report takes several such words
BARE = {"check": "report", "push": "repo", "summary": "folder", "report": "runs"}
DRY = ("prune", "push", "study")  # the commands that know --dry-run


@dataclass(frozen=True)
class Ground:
    """Where a command line writes, and what was there before."""

    multirun: bool
    folder: Path  # of the run, or of all jobs
    writes: bool  # results, or nothing but what it prints
    existing: Path  # the innermost folder above it, or itself, that was there
    entries: frozenset[Path]  # of `folder`
    own: frozenset[str]  # what Hydra and corp put in a folder besides results
    asked: Any = None  # the typed config of a single run


def parse_flags(command: str, args: Sequence[str]) -> Namespace:
    """Hydra's flags and the `overrides` among `args`, in any order; unknown flags raise CorpError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            flags = args_parser().parse_intermixed_args(open_args(args))
    except SystemExit:
        said = complaint.getvalue().rpartition("error: ")[2].strip()
        known = keys_of(command)
        typed = meant.flag(said, args, [*dict.fromkeys(key.partition(".")[0] for key in known), *known])
        hint = f"write {typed}" if typed else f"see corp {command} --help"
        raise CorpError(f"{said[:1].upper()}{said[1:]}; {hint}") from None
    for name in ("config_path", "experimental_rerun"):
        if getattr(flags, name) is not None:
            raise CorpError(f"corp has no --{name.replace('_', '-')}; --config-dir adds a folder of configs.")
    return flags


def spelled_out(command: str, args: Sequence[str]) -> list[str]:
    """The `args` of a command as overrides: a bare word gets its key, and --against FILE is against=FILE."""
    words, rest = [], iter(args)
    for word in rest:
        flag, equals, path = word.partition("=")
        if command == "check" and flag == "--against":
            path = path if equals else next(rest, "")
            if not path or path.startswith("-"):
                raise CorpError("--against needs a file, as in corp check report.json --against baseline.json")
            word = f"against={quoted(path)}"
        words.append(word)
    bare = [word for word in parse_flags(command, words).overrides if "=" not in word and not word.startswith("~")]
    if bare and command == "report":
        return [*(word for word in words if word not in bare), f"runs=[{','.join(map(quoted, bare))}]"]
    if len(bare) > 1:
        second = bare[1]
        advice = {
            "check": f"name the baseline as --against {second}",
            "push": f"is {second} meant as checkpoint={second}?",
        }.get(command, "give one that holds them all")
        raise CorpError(f"corp {command} takes one {BARE[command]} at a time; {advice}")
    return [f"{BARE[command]}={quoted(word)}" if word in bare else word for word in words]


def dry(args: Sequence[str]) -> list[str]:
    """The `args` of a command of DRY, with --dry-run spelled out as dry_run=true; then Hydra writes no files either."""
    words = ["dry_run=true" if arg == "--dry-run" else arg for arg in args]
    nothing = ["hydra.output_subdir=null", "hydra/job_logging=none"]
    return [*words, *nothing] if "dry_run=true" in words else words


def quoted(value: str) -> str:
    """`value` as Hydra reads it literally."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value)
    return f'"{escaped}"'


def config_loader(extra_dir: str | None) -> ConfigLoader:
    """Hydra's loader of corp's configs and, after them, of those in the folder given as --config-dir."""
    version.setbase("1.3")
    setup_globals()
    register()
    if extra_dir is not None and not Path(extra_dir).is_dir():
        raise CorpError(f"--config-dir {extra_dir} is not a folder; give one that holds YAML configs.")
    return make_loader(str(config_dir().resolve()), extra_dir and str(Path(extra_dir).resolve()))


def fits(command: str, group: str, choice: str, loader: ConfigLoader) -> bool:
    """Whether `command` knows every key of a choice: `gate` has more of them in corp check than in corp prune."""
    schema = {item.name: item.default_factory for item in fields(COMMANDS[command].schema)}.get(group)
    keys = keys_of_choice(loader, f"{group}/{choice}")
    if keys is None or not (isinstance(schema, type) and is_dataclass(schema)):
        return True
    return keys <= {item.name for item in fields(schema)}


def check(command: str, flags: Namespace, loader: ConfigLoader) -> Ground:
    """Refuse what the run would fail on, and settle the folder that it writes to → what is there before it."""
    name = flags.config_name or command
    if flags.cfg and flags.package:
        with plain_errors(command, flags.overrides, loader):
            shown = loader.load_configuration(name, flags.overrides, RunMode.RUN)
        if flags.package != "_global_" and OmegaConf.select(shown, flags.package) is None:
            raise CorpError(f"There is nothing to show at --package {flags.package}.")
    if flags.hydra_help or flags.cfg or flags.info:
        return survey(Path.cwd(), False, False, "")
    with plain_errors(command, flags.overrides, loader), warnings.catch_warnings():
        warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
        master = loader.load_configuration(name, flags.overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        multirun = flags.multirun or master.hydra.mode == RunMode.MULTIRUN
        if multirun and not COMMANDS[command].writes_folder:
            raise CorpError(f"corp {command} does one thing at a time; leave out --multirun.")
        if multirun:
            check_sweep(command, master, loader)
            config, key, asked = master, "hydra.sweep.dir", None
        else:
            config, key = loader.load_configuration(name, flags.overrides, RunMode.RUN), "hydra.run.dir"
            asked = typed(task_part(config), COMMANDS[command].schema)
        HydraConfig.instance().set_config(config)
        folder = Path(OmegaConf.select(config, key)).absolute()
        log = f"{config.hydra.job.name}.log"
    writes = COMMANDS[command].writes_folder and not config.get("dry_run")
    if writes:
        require_room(folder, key=key)
    flags.overrides.append(f"{key}={quoted(str(folder))}")  # a name made of the time would be another one later
    return replace(survey(folder, writes, multirun, log), asked=asked)


def check_sweep(command: str, master: DictConfig, loader: ConfigLoader) -> None:
    """Raise CorpError unless every job of a multirun is in range and has its folder, and what the sweeper needs."""
    require_objective(command, master)
    taken: dict[str, int] = {}
    for number, overrides in enumerate(sweep_jobs(master, loader)):
        with plain_errors(command, overrides, loader):
            job = loader.load_sweep_config(master, overrides)
            typed(task_part(job), COMMANDS[command].schema)
            with read_write(job), open_dict(job):
                job.hydra.job.num = job.hydra.job.id = number  # as the launcher will
            HydraConfig.instance().set_config(job)
            subdir = str(OmegaConf.select(job, "hydra.sweep.subdir"))
        other = taken.setdefault(os.path.normpath(subdir), number)
        if other != number:
            raise CorpError(
                f"hydra.sweep.subdir={subdir} is the folder of job {other} and of job {number}, which would write over "
                "each other; leave it out, or put ${hydra.job.num} in it."
            )


def survey(folder: Path, writes: bool, multirun: bool, log: str) -> Ground:
    """What is where a command line writes."""
    existing = next(part for part in (folder, *folder.parents) if part.exists())
    entries = frozenset(folder.iterdir()) if folder.is_dir() else frozenset()
    saved = (".hydra", *(f".hydra/{name}" for name in ("config.yaml", "hydra.yaml", "overrides.yaml", "resume.json")))
    return Ground(multirun, folder, writes, existing, entries, frozenset({*saved, "multirun.yaml", log}))


def remove_unused(output_dir: Path, ground: Ground) -> None:
    """Remove `output_dir`, then the folders above it, while the run made them and no result is in them."""
    if ground.entries & {output_dir, *output_dir.parents}:
        return
    for folder in (output_dir, *output_dir.parents):
        if folder == ground.existing:
            return
        if not folder.is_dir():
            continue
        found = [*folder.iterdir(), *folder.glob(".hydra/*")]
        if not {str(path.relative_to(folder)) for path in found} <= ground.own:
            return
        shutil.rmtree(folder)


def task_part(cfg: DictConfig) -> DictConfig:
    """`cfg` without Hydra's own node."""
    task = cfg.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task


@contextlib.contextmanager
def command_line(flags: Namespace) -> Iterator[None]:
    """For the duration, let Hydra read `flags` from sys.argv, raise its errors and keep its warnings quiet."""
    # Overrides first: Hydra's own parser takes them only in one piece, and --info would swallow one behind it.
    given = {name: value for name, value in vars(flags).items() if name not in ("overrides", "help") and value}
    options = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["corp", *flags.overrides, *options]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
