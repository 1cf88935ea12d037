"""All that corp takes from `hydra._internal`, which Hydra may change at any time.

Hydra's public interface composes a config, but neither parses a command line without running it, nor tells which jobs
a sweep will have.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

TRIED = ("1.3.2", "1.3.8")  # the first and the last hydra-core that the tests in tests/cli passed with


def args_parser() -> ArgumentParser:
    """What reads Hydra's flags and overrides."""
    return get_args_parser()


def make_loader(folder: str, extra: str | None) -> ConfigLoader:
    """Hydra's loader of the configs in `folder`, then of those in the folder `extra`."""
    search_path = create_config_search_path(folder)
    if extra is not None:
        search_path.prepend("command-line", f"file://{extra}", SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(search_path)


def keys_of_choice(loader: ConfigLoader, name: str) -> set[str] | None:
    """The keys that the config `name`, as in gate/strict, sets itself; None where there is none."""
    assert isinstance(loader, ConfigLoaderImpl)
    found = loader.repository.load_config(name)
    return None if found is None else {str(key) for key in found.config}


def sweep_jobs(master: DictConfig, loader: ConfigLoader) -> list[list[str]]:
    """The overrides of every job of a multirun; none where a plugin's sweeper finds them as it goes."""
    sweeper: Any = master.hydra.sweeper
    if sweeper._target_ != BasicSweeperConf._target_:
        return []
    given = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    overrides = OverridesParser.create(loader).parse_overrides([*given, *master.hydra.overrides.task])
    return BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]


def candidates(loader: ConfigLoader, config_name: str, words: Sequence[str]) -> list[str]:
    """What Hydra offers for the last of `words`."""
    return BashCompletion(loader)._query(config_name, " ".join(words))
