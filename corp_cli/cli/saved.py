"""The config of an earlier run, and the run that goes on from it: `--config-dir F/.hydra`, `resume=F`.

It is read as data and laid over corp's own. Hydra never searches the folder that it lies in, and it may hold neither a
`hydra` node nor a defaults list, so that a folder from somebody else cannot say what code is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from corp_cli.cli.completion import PATH_KEYS
from corp_cli.cli.hydra_app import quoted
from corp_cli.cli.messages import LAID_OVER, plain_errors
from corp_cli.errors import CorpError
from corp_cli.files.output import STATE, write_json, write_whole
from corp_cli.files.owned import is_own

SAVED = ".hydra"  # what Hydra calls the folder of the configs that it saves
RECORD = "resume.json"  # beside them, by corp


@dataclass(frozen=True)
class Record:
    """What must be known of a run to go on with it; written whole or not at all, after the config."""

    configs: tuple[str, ...]  # SHA-256 of config.yaml: of two while one takes the place of the other
    folder: str  # where the run began, and with it all relative paths


def holds_state(output_dir: Path) -> bool:
    """Whether a run left anything to go on from."""
    return is_own(output_dir / STATE) and any((output_dir / STATE).glob("*.safetensors"))


def hint(output_dir: Path) -> str:
    """How to go on with the run in `output_dir`; empty where that is not possible."""
    possible = holds_state(output_dir) and read_record(output_dir) is not None
    return f"go on with: corp prune resume={shlex.quote(str(output_dir))}" if possible else ""


def resume(flags: Namespace) -> Path | None:
    """The config of the run in the folder that resume=FOLDER names, with `flags` set to go on there; None without one.

    Raises CorpError where there is nothing to go on with.
    """
    asked = [arg for arg in flags.overrides if arg.startswith("resume=")]
    if not asked:
        return None
    folder = Path(asked[-1].partition("=")[2]).expanduser().absolute()
    config = folder / SAVED / "config.yaml"
    if not os.path.isfile(config):  # which takes any name
        raise CorpError(
            f"resume={folder} holds no run to go on with; give the folder of a corp prune that was stopped."
        )
    if (folder / "report.json").is_file() and not holds_state(folder):
        raise CorpError(f"resume={folder} holds a run that is done; there is nothing to go on with.")
    if flags.multirun:
        raise CorpError("resume goes on with one run; leave out --multirun.")
    if flags.config_name:
        raise CorpError("resume brings the config of its run along; leave out --config-name.")
    record = read_record(folder)
    if record is None or sha256(config) not in record.configs:
        raise CorpError(
            f"{config} is not what that run wrote, or not all of it; begin anew, and write what is to change behind "
            "resume=FOLDER, as in seed=1."
        )
    typed = [anchored(arg) for arg in flags.overrides if not arg.startswith("resume=")]
    # Hydra would write over the config at once; `recorded` does so whole or not at all.
    flags.overrides = [f"hydra.run.dir={quoted(str(folder))}", "hydra.output_subdir=null", *typed]
    return config


def anchored(override: str) -> str:
    """`override` with a relative path made absolute: those of the run itself begin where that began."""
    with contextlib.suppress(HydraException):  # what cannot be read is refused later, in a sentence
        (found,) = OverridesParser.create().parse_overrides([override])
        key, value = found.key_or_group, found.value()
        kind, colon, place = value.partition(":") if key == "model.name" and isinstance(value, str) else ("", "", value)
        # calibration.path may also name a data set, model.name a model; a cache need not be there yet.
        sure = key in PATH_KEYS and not key.endswith(".path")
        if isinstance(place, str) and place and (sure or (key in (*PATH_KEYS, "model.name") and Path(place).exists())):
            return f"{key}={quoted(f'{kind}{colon}{os.path.abspath(os.path.expanduser(place))}')}"
    return override


def take_config(flags: Namespace) -> Path | None:
    """The file that --config-dir and --config-name name; a folder of saved configs is in `flags` no longer."""
    if flags.config_dir is None:
        return None
    path = Path(flags.config_dir, f"{(flags.config_name or '').removesuffix('.yaml')}.yaml")
    if Path(flags.config_dir).resolve().name == SAVED:
        flags.config_dir = None
    return path if flags.config_name is not None and path.is_file() else None


def lay_over(command: str, path: Path, flags: Namespace, loader: ConfigLoader) -> None:
    """Let a config without a defaults list, such as a run's saved .hydra/config.yaml, set values of `command`'s own.

    Raises CorpError where it says what only a config of the user's own may, or where a group is chosen that it sets:
    its values would silently win over the choice.
    """
    with plain_errors(command, flags.overrides, loader):
        content = OmegaConf.load(path)
        chosen = [one.key_or_group for one in OverridesParser.create().parse_overrides(flags.overrides)]
    if not isinstance(content, DictConfig) or not content:
        raise CorpError(f"{path} is not a config: it holds no keys with values; see corp {command} --help")
    keys = {str(key) for key in content}  # `in content` would miss what is interpolated
    if "defaults" in keys and path.parent.resolve().name != SAVED:
        return
    for key in keys & {"defaults", "hydra"}:
        raise CorpError(
            f"{path} sets {key}, which no run saves; leave it out, or make a config of your own that begins with "
            f"defaults: [{command}, _self_]."
        )
    for group in chosen:
        if group in keys and loader.get_group_options(group):
            raise CorpError(f"{path} sets all of {group} already; change single keys, as in {group}.KEY=VALUE.")
    flags.config_name = f"{path.stem}{LAID_OVER}"
    values = OmegaConf.to_container(content, resolve=False)
    assert isinstance(values, dict)
    ConfigStore.instance().store(flags.config_name, {"defaults": [command, "_self_"], **values})


@contextlib.contextmanager
def recorded(output_dir: Path, cfg: DictConfig, began: Path, resumed: bool) -> Iterator[Path]:
    """Keep what resume needs of the run that is the body → the folder that it began in, if it is `resumed` long ago.

    A resumed run leaves the settings that were typed anew, unless it ends in an error: a mistake must not stay.
    """
    config, record = output_dir / SAVED / "config.yaml", read_record(output_dir)
    if not resumed or record is None:
        write_json(asdict(Record((sha256(config),), str(began))), config.with_name(RECORD))
        yield began
        return
    before = config.read_text("utf-8")
    replace_config(config, OmegaConf.to_yaml(cfg), record)
    try:
        yield Path(record.folder)
    except Exception:
        with contextlib.suppress(CorpError):  # a full disk
            replace_config(config, before, record)
        raise


def replace_config(path: Path, text: str, record: Record) -> None:
    """Write `text` to `path`, with a record that fits whatever is there at any time."""
    new = hashlib.sha256(text.encode()).hexdigest()
    write_json(asdict(replace(record, configs=(sha256(path), new))), path.with_name(RECORD))
    write_whole(path, lambda file: file.write(text))


def read_record(output_dir: Path) -> Record | None:
    """What is kept of the run in `output_dir`; None where that is nothing."""
    try:
        found = json.loads((output_dir / SAVED / RECORD).read_text("utf-8"))
        return Record(tuple(found["configs"]), str(found["folder"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def sha256(path: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
