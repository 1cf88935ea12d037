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
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Iterator, Sequence

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from corp_cli.cli.compose import config_dir, register, typed
from corp_cli.cli.messages import LAID_OVER, plain_errors
from corp_cli.config.prune import SCHEMAS
from corp_cli.errors import CorpError
from corp_cli.files.output import STATE, require_room

WRITES_NO_FOLDER = ("info", "check", "doctor")


def parse_flags(command: str, args: Sequence[str]) -> Namespace:
    """Hydra's flags and the `overrides` among `args`, in any order; unknown flags raise CorpError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            flags = get_args_parser().parse_intermixed_args(args)
    except SystemExit:
        said = complaint.getvalue().rpartition("error: ")[2].strip()
        raise CorpError(f"{said[:1].upper()}{said[1:]}; see corp {command} --help") from None
    for name in ("config_path", "experimental_rerun"):
        if getattr(flags, name) is not None:
            raise CorpError(f"corp has no --{name.replace('_', '-')}; --config-dir adds a folder of configs.")
    return flags


def spelled_out(args: Sequence[str]) -> list[str]:
    """The `args` of corp check as overrides: FILE is report=FILE, and --against FILE is against=FILE."""
    words, rest = [], iter(args)
    for word in rest:
        flag, equals, path = word.partition("=")
        if flag == "--against":
            path = path if equals else next(rest, "")
            if not path or path.startswith("-"):
                raise CorpError("--against needs a file, as in corp check report.json --against baseline.json")
            word = f"against={quoted(path)}"
        words.append(word)
    bare = [word for word in parse_flags("check", words).overrides if "=" not in word and not word.startswith("~")]
    if len(bare) > 1:
        raise CorpError(f"corp check looks at one report at a time; name the baseline as --against {bare[1]}")
    return [f"report={quoted(word)}" if word in bare else word for word in words]


def resumed(args: Sequence[str]) -> list[str]:
    """The `args` of corp prune, with resume=FOLDER spelled out: the saved config of that run, and its folder again."""
    asked = [arg for arg in args if arg.startswith("resume=")]
    if not asked:
        return list(args)
    folder = Path(asked[-1].partition("=")[2]).expanduser().absolute()
    if not (folder / ".hydra/config.yaml").is_file():
        raise CorpError(
            f"resume={folder} holds no run to go on with; give the folder of a corp prune that was stopped."
        )
    if (folder / "report.json").is_file():
        raise CorpError(f"resume={folder} holds a run that is done; there is nothing to go on with.")
    if {"-m", "--multirun"}.intersection(args):
        raise CorpError("resume goes on with one run; leave out --multirun.")
    saved = ["--config-dir", str(folder / ".hydra"), "--config-name", "config", f"hydra.run.dir={quoted(str(folder))}"]
    return [*saved, *(arg for arg in args if not arg.startswith("resume="))]


def holds_state(output_dir: Path) -> bool:
    """Whether an interrupted run left anything to go on with."""
    return any((output_dir / STATE).glob("*.safetensors"))


def dry(args: Sequence[str]) -> list[str]:
    """The `args` of corp prune, with --dry-run spelled out as dry_run=true; then Hydra writes no files either."""
    words = ["dry_run=true" if arg == "--dry-run" else arg for arg in args]
    nothing = ["hydra.output_subdir=null", "hydra/job_logging=none"]
    return [*words, *nothing] if "dry_run=true" in words else words


def quoted(value: str) -> str:
    """`value` as Hydra reads it literally."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value)
    return f'"{escaped}"'


def config_loader(extra_dir: str | None) -> ConfigLoaderImpl:
    """Hydra's loader of corp's configs and, after them, of those in the folder given as --config-dir."""
    version.setbase("1.3")
    setup_globals()
    register()
    search_path = create_config_search_path(str(config_dir().resolve()))
    if extra_dir is not None:
        if not Path(extra_dir).is_dir():
            raise CorpError(f"--config-dir {extra_dir} is not a folder; give one that holds YAML configs.")
        where = f"file://{Path(extra_dir).resolve()}"
        search_path.prepend(provider="command-line", path=where, anchor=SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(search_path)


def fits(command: str, group: str, choice: str, loader: ConfigLoaderImpl) -> bool:
    """Whether `command` knows every key of a choice: `gate` has more of them in corp check than in corp prune."""
    schema = {item.name: item.default_factory for item in fields(SCHEMAS[command])}.get(group)
    found = loader.repository.load_config(f"{group}/{choice}")
    if found is None or not (isinstance(schema, type) and is_dataclass(schema)):
        return True
    return {str(key) for key in found.config} <= {item.name for item in fields(schema)}


def lay_over(command: str, flags: Namespace, loader: ConfigLoaderImpl) -> None:
    """Let a config without a defaults list, such as a run's saved .hydra/config.yaml, set values of `command`'s own.

    Raises CorpError where a group is chosen that such a config sets: its values would silently win over the choice.
    """
    path = Path(flags.config_dir or "", f"{(flags.config_name or '').removesuffix('.yaml')}.yaml")
    if flags.config_dir is None or flags.config_name is None or not path.is_file():
        return
    with plain_errors(command, flags.overrides, loader):
        content = OmegaConf.load(path)
        chosen = [one.key_or_group for one in OverridesParser.create().parse_overrides(flags.overrides)]
    if not isinstance(content, DictConfig):
        raise CorpError(f"{path} is not a config: it holds no keys with values; see corp {command} --help")
    if "defaults" in content:
        return
    for group in chosen:
        if group in content and loader.get_group_options(group):
            raise CorpError(f"{path} sets all of {group} already; change single keys, as in {group}.KEY=VALUE.")
    flags.config_name = f"{path.stem}{LAID_OVER}"
    ConfigStore.instance().store(flags.config_name, {"defaults": [command, "_self_"], **content})


def check(command: str, flags: Namespace, loader: ConfigLoaderImpl) -> tuple[bool, Path]:
    """Refuse what the run would fail on → (is it a multirun?, the innermost existing folder it writes to)."""
    name = flags.config_name or command
    if flags.cfg and flags.package:
        with plain_errors(command, flags.overrides, loader):
            shown = loader.load_configuration(name, flags.overrides, RunMode.RUN)
        if flags.package != "_global_" and OmegaConf.select(shown, flags.package) is None:
            raise CorpError(f"There is nothing to show at --package {flags.package}.")
    if flags.hydra_help or flags.cfg or flags.info:
        return False, Path.cwd()
    with plain_errors(command, flags.overrides, loader), warnings.catch_warnings():
        warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
        master = loader.load_configuration(name, flags.overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        multirun = flags.multirun or master.hydra.mode == RunMode.MULTIRUN
        if multirun and command in WRITES_NO_FOLDER:
            raise CorpError(f"corp {command} does one thing at a time; leave out --multirun.")
        if not multirun:
            job = loader.load_configuration(name, flags.overrides, RunMode.RUN)
            check_job(command, job)
        for overrides in sweep_jobs(master, loader) if multirun else []:
            with plain_errors(command, overrides, loader):
                check_job(command, loader.load_sweep_config(master, overrides))
        HydraConfig.instance().set_config(job if not multirun else master)
        output_dir = Path(master.hydra.sweep.dir if multirun else job.hydra.run.dir).absolute()
    if command not in WRITES_NO_FOLDER:
        require_room(output_dir, key="hydra.sweep.dir" if multirun else "hydra.run.dir")
    return multirun, next(folder for folder in (output_dir, *output_dir.parents) if folder.exists())


def check_job(command: str, cfg: DictConfig) -> None:
    """Raise CorpError unless every value of the composed `cfg` is in range."""
    typed(task_part(cfg), SCHEMAS[command])


def task_part(cfg: DictConfig) -> DictConfig:
    """`cfg` without Hydra's own node."""
    task = cfg.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task


def sweep_jobs(master: DictConfig, loader: ConfigLoaderImpl) -> list[list[str]]:
    """The overrides of every job of a multirun; none where a plugin's sweeper finds them as it goes."""
    sweeper = master.hydra.sweeper
    if sweeper._target_ != BasicSweeperConf._target_:
        return []
    given = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    overrides = OverridesParser.create(loader).parse_overrides([*given, *master.hydra.overrides.task])
    return BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]


@contextlib.contextmanager
def command_line(flags: Namespace, args: Sequence[str]) -> Iterator[None]:
    """For the duration, let Hydra read `args` from sys.argv, raise its errors and keep its warnings quiet."""
    options = list(args)
    for override in flags.overrides:
        options.remove(override)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra's own parser takes overrides only in one piece; last they could be swallowed by --info.
    name = ["--config-name", flags.config_name] if flags.config_name else []  # the last one counts
    sys.argv = ["corp", *flags.overrides, *options, *name]
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


def remove_unused(output_dir: Path, kept: Path) -> None:
    """Remove `output_dir`, then the folders above it up to `kept`, while they hold only Hydra's own files."""
    for folder in (output_dir, *output_dir.parents):
        if not folder.is_dir():
            continue
        names = {entry.name for entry in folder.iterdir() if entry.suffix != ".log"}
        if folder == kept or names - {".hydra", "multirun.yaml"}:
            return
        shutil.rmtree(folder)
