"""What `corp COMMAND --help` prints: the template in configs/hydra/help, filled in."""

from __future__ import annotations

import re
import shutil
import textwrap
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Iterable, Iterator

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from corp_cli.cli.hydra_app import fits, task_part
from corp_cli.cli.messages import plain_errors
from corp_cli.cli.table import COMMANDS

# A key of a YAML file, or of a section in it, and what is said of it.
NOTED = r"^((?:  )?)(\w+):(?:.*?  # (.+(?:\n\1# .+)*))?$"


def help_text(command: str, flags: Namespace, loader: ConfigLoader) -> str:
    """`hydra.help.template` of the config, with the groups and the explained keys as `flags` leave them.

    Hydra's own --help takes twice as long: it copies every config anew for every group that it lists.
    """
    with plain_errors(command, flags.overrides, loader):
        cfg = loader.load_configuration(flags.config_name or command, flags.overrides, RunMode.RUN)
    known = {item.name for item in fields(COMMANDS[command].schema)}
    groups = [group for group in loader.get_group_options("", ObjectType.GROUP) if group in known]
    width = min(120, max(80, shutil.get_terminal_size().columns))
    listed: list[str] = []
    for group in sorted(groups):
        if not (choices := [one for one in loader.get_group_options(group) if fits(command, group, one, loader)]):
            continue
        listed.append(f"  {group}:")
        for choice in choices:
            listed += beside(f"    {choice}", purpose(f"{group}/{choice}.yaml", loader), 18, width)
    yaml = shallow(OmegaConf.to_yaml(task_part(cfg), resolve=flags.resolve))
    keys = explained(yaml, comments(command, groups, cfg, loader), width)
    template = Template(cfg.hydra.help.template)
    return template.safe_substitute(APP_CONFIG_GROUPS="\n".join(listed), CONFIG="\n".join(keys))


def shallow(yaml: str) -> str:
    """The lines of `yaml` without tables in a section: `…` stands for the rows of an experiment."""
    return re.sub(r"^(  \w+):\n(?:  - \w+:.*\n|    .*\n)+", r"\1: …\n", yaml, flags=re.MULTILINE)


def beside(text: str, note: str, column: int, width: int, mark: str = "  ") -> list[str]:
    """`text` with `note` behind it from a column on, in as many lines as it takes."""
    room = max(30, width - column - len(mark))
    lines = textwrap.wrap(note, room, break_long_words=False, break_on_hyphens=False) or [""]
    starts = [text, *[""] * (len(lines) - 1)]
    return [f"{start:<{column}}{mark}{line}".rstrip() for start, line in zip(starts, lines, strict=True)]


def explained(yaml: str, notes: dict[str, str], width: int) -> Iterator[str]:
    """The lines of `yaml`, two spaces further in, those of a dotted key in `notes` with its note behind."""
    parent = ""
    for line in yaml.splitlines():
        inner, name = line.startswith(" "), line.strip().partition(":")[0]
        if not inner:
            parent = f"{name}." if line.endswith(":") else ""
        note = notes.get(f"{parent}{name}" if inner else name)
        yield from beside(f"  {line}", note, 28, width, "  # ") if note else [f"  {line}"]


def purpose(file: str, loader: ConfigLoader) -> str:
    """The first sentence of what the YAML `file` says of itself."""
    for path in paths_of(file, loader):
        said = [line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")]
        return " ".join(line for line in said[:3] if not line.startswith("@")).partition(". ")[0].rstrip(".")
    return ""


def comments(command: str, groups: Iterable[str], cfg: DictConfig, loader: ConfigLoader) -> dict[str, str]:
    """dotted key → the comment behind it in the YAML file, of those `cfg` is made of, that sets it.

    What the choice from a group does not explain, the first file of the group does that explains it.
    """
    files: dict[str, str] = {}
    for group in groups:
        chosen = cfg.hydra.runtime.choices.get(group)
        options = [one for one in reversed(loader.get_group_options(group)) if one != chosen]
        files |= {f"{group}/{choice}.yaml": f"{group}." for choice in (*options, *([chosen] if chosen else []))}
    files[f"{command}.yaml"] = ""  # last: what it says of a key of a group counts
    notes = {}
    for name, parent in files.items():
        for path in paths_of(name, loader):
            text = path.read_text("utf-8")
            within = "" if text.startswith("# @package _global_") else parent
            section = ""
            for inner, key, note in re.findall(NOTED, text, re.MULTILINE):
                section = section if inner else f"{key}."
                if note:
                    notes[f"{within}{section if inner else ''}{key}"] = re.sub(r"\n *# ", " ", note)
    return notes


def paths_of(file: str, loader: ConfigLoader) -> list[Path]:
    """Where a config file is, in corp's own folder and in that of --config-dir."""
    places = [Path(source.path, file) for source in loader.get_sources() if source.scheme() == "file"]
    return [path for path in places if path.is_file()]
