"""What `corp COMMAND --help` prints: the template in configs/hydra/help, filled in."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Iterator

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from corp_cli.cli.hydra_app import fits, task_part
from corp_cli.cli.messages import plain_errors
from corp_cli.cli.table import COMMANDS


def help_text(command: str, flags: Namespace, loader: ConfigLoader) -> str:
    """`hydra.help.template` of the config, with the groups and the explained keys as `flags` leave them.

    Hydra's own --help takes twice as long: it copies every config anew for every group that it lists.
    """
    with plain_errors(command, flags.overrides, loader):
        cfg = loader.load_configuration(flags.config_name or command, flags.overrides, RunMode.RUN)
    known = {item.name for item in fields(COMMANDS[command].schema)}
    groups = [group for group in loader.get_group_options("", ObjectType.GROUP) if group in known]
    listed = []
    for group in sorted(groups):
        choices = [one for one in loader.get_group_options(group) if fits(command, group, one, loader)]
        listed.append(f"  {group}: {', '.join(choices)}")
    keys = explained(OmegaConf.to_yaml(task_part(cfg), resolve=flags.resolve), comments(command, cfg, loader))
    template = Template(cfg.hydra.help.template)
    return template.safe_substitute(APP_CONFIG_GROUPS="\n".join(listed), CONFIG="\n".join(keys))


def explained(yaml: str, notes: dict[str, str]) -> Iterator[str]:
    """The lines of `yaml`, two spaces further in, those of a dotted key in `notes` with its note behind."""
    parent = ""
    for line in yaml.splitlines():
        if not line.startswith(" "):
            parent = f"{line[:-1]}." if line.endswith(":") else ""
        note = notes.get(parent + line.strip().partition(":")[0])
        yield f"  {line:<26}  # {note}" if note else f"  {line}"


def comments(command: str, cfg: DictConfig, loader: ConfigLoader) -> dict[str, str]:
    """dotted key → the comment behind it in the YAML file, of those `cfg` is made of, that sets it."""
    files = {f"{command}.yaml": ""}
    files |= {f"{group}/{choice}.yaml": f"{group}." for group, choice in cfg.hydra.runtime.choices.items()}
    notes = {}
    for source in loader.get_sources():
        for name, parent in files.items():
            path = Path(source.path, name)
            if source.scheme() == "file" and path.is_file():
                found = re.findall(r"^(\w+):.*?  # (.+)$", path.read_text("utf-8"), re.MULTILINE)
                notes.update({parent + key: note for key, note in found})
    return notes
