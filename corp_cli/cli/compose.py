"""From YAML and overrides to a typed config. Imports Hydra only when it is used, so that help stays quick."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from corp_cli.cli.table import COMMANDS
from corp_cli.config.prune import PruneConfig
from corp_cli.config.shareable import from_environment
from corp_cli.errors import CorpError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Config = TypeVar("Config")


def config_dir() -> Path:
    """The folder of YAML configs: inside the installed package, or at the top of a source checkout."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def slug(name: str) -> str:
    """`name` with everything but letters, digits, '.', '_' and '-' replaced, so that it can name a folder."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip(".") or "_"


def register() -> None:
    """Hand the schemas to Hydra's ConfigStore (`prune_schema`, ...) and `slug` to OmegaConf."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    for name, command in COMMANDS.items():
        if f"{name}_schema.yaml" not in store.repo:  # from before, in this process
            store.store(name=f"{name}_schema", node=command.schema)
    OmegaConf.register_new_resolver("slug", slug, replace=True)


def open_args(overrides: Iterable[str]) -> list[str]:
    """`overrides`, with those of model.args, which holds any key, as Hydra wants keys that are not there yet."""
    return [f"++{one}" if re.match(r"model\.args[.=]", one) else one for one in overrides]


def load_config(*overrides: str) -> PruneConfig:
    """The config that `corp prune <overrides>` runs with; raises CorpError where that command would."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from corp_cli.cli.messages import plain_errors  # imports Hydra

    register()
    with (
        initialize_config_dir(config_dir=str(config_dir().resolve()), version_base="1.3"),
        plain_errors("prune", overrides, GlobalHydra.instance().config_loader()),
    ):
        return typed(compose(config_name="prune", overrides=open_args(overrides)), PruneConfig)


def composer(given: Sequence[str]) -> Callable[[Sequence[str], Sequence[str]], tuple[list[str], PruneConfig]]:
    """What makes a run of `corp prune` of the job at hand, whose overrides are `given`, for a row of a study.

    It takes overrides that stand before `given`, and those that stand behind; the last of a key counts → (all that
    `corp prune` is told, its config). Raises CorpError where that command would.
    """
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from corp_cli.cli.messages import plain_errors

    known = {item.name for item in fields(PruneConfig)}

    def row(before: Sequence[str], behind: Sequence[str]) -> tuple[list[str], PruneConfig]:
        by_key = {re.split(r"[=@]", one.lstrip("+~"))[0]: one for one in (*before, *given, *behind)}
        command = [one for key, one in by_key.items() if key.partition(".")[0] in known and key != "dry_run"]
        overrides = [one for key, one in by_key.items() if key != "dry_run"]
        with plain_errors("study", overrides, GlobalHydra.instance().config_loader()):
            name = HydraConfig.get().job.config_name
            whole = typed(compose(config_name=name, overrides=overrides), COMMANDS["study"].schema)
        return command, PruneConfig(**{key: getattr(whole, key) for key in known})

    return row


def typed(cfg: DictConfig, schema: type[Config]) -> Config:
    """`cfg` as the dataclass `schema`; its range checks, and keys that it does not know, raise CorpError."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(cfg)
    if not isinstance(config, schema):
        raise CorpError("This config does not build on corp's own; put prune first in its defaults list.")
    for key in forced_keys(config):
        raise CorpError(f"corp has no key {key}; leave it out, or see corp prune --help")
    mark_environment(config, OmegaConf.to_container(cfg), OmegaConf.to_container(cfg))
    return config


def mark_environment(config: Any, raw: Any, whole: Any) -> None:
    """Mark the strings of `config` that an environment variable went into: the text that they stand for is in `raw`.

    `raw` is a part of the config `whole`. Files that may be passed on hold no such string; see `shareable`.
    """
    content = config if isinstance(config, dict | list) else vars(config)
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        asked = raw[key] if isinstance(raw, list) else raw.get(key)
        if isinstance(value, str) and isinstance(asked, str) and asks_environment(asked, whole):
            content[key] = from_environment(value, asked)
        elif (isinstance(value, dict | list) or is_dataclass(value)) and isinstance(asked, dict | list):
            mark_environment(value, asked, whole)


def asks_environment(text: str, whole: Any, depth: int = 9) -> bool:
    """Whether `text` of the config `whole` has an environment variable in it, perhaps by way of other keys."""
    if "${oc.env" in text:
        return True
    for reference in re.findall(r"\$\{([\w.]+)\}", text):
        found = whole
        for part in reference.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, str) and depth and asks_environment(found, whole, depth - 1):
            return True
    return False


def forced_keys(config: Any, parent: str = "") -> Iterator[str]:
    """The dotted keys of `config` that are not in its schema: Hydra lets +key=value add anything."""
    known = {item.name for item in fields(config)}
    for name, value in vars(config).items():
        if name not in known:
            yield f"{parent}{name}"
        elif is_dataclass(value):
            yield from forced_keys(value, f"{parent}{name}.")
