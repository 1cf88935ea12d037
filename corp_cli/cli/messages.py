"""Hydra's and OmegaConf's errors as one plain sentence: what is wrong, by name, and what to write instead."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Iterable, Iterator, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError

from corp_cli.cli import meant
from corp_cli.cli.plugins import not_installed
from corp_cli.cli.table import COMMANDS
from corp_cli.errors import CorpError

# OmegaConf's name of a type → what a user should write.
EXPECTED = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}

# Keys that take a list, groups in whose place one does, and a key that takes one of what such a list holds.
LISTS = {"export.formats": "export.formats", "export": "export.formats", "dtypes": "dtypes", "runs": "runs"}
SINGLE = ("format",)

LAID_OVER = "_laid_over"  # what hydra_app adds to the name of a config that has no defaults list


@contextmanager
def plain_errors(command: str, overrides: Sequence[str], loader: ConfigLoader) -> Iterator[None]:
    """Raise CorpError, with a plain sentence, where Hydra refuses the config of `corp <command> <overrides>`."""
    try:
        for key, value in _lists_given(overrides):
            if key == "export" and len(value) > 1:  # of whose choices Hydra would take the last alone
                raise CorpError(f"export takes one choice; write export.formats=[{','.join(map(str, value))}].")
        yield
    except (HydraException, OmegaConfBaseException, MarkedYAMLError, UserWarning, ValueError, ArithmeticError) as error:
        raise CorpError(explain(error, command, overrides, loader)) from error


def explain(error: Exception, command: str, overrides: Sequence[str], loader: ConfigLoader) -> str:
    """The sentence for `error`: what is wrong, by name, and what to do."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, command, overrides, loader)
    if isinstance(error, MissingConfigException) and error.options is None:
        return _missing_config(error, loader)
    if isinstance(error, MissingConfigException) or type(error) is ValueError:
        for group, choice in _choices_made(overrides):
            options = loader.get_group_options(group)
            if options and choice not in options:
                return not_installed(group, choice) or _wrong_choice(group, choice, options, command)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, is not valid YAML: {error.problem}."
    message = str(error)
    if named := re.match(r"Could not override '(.+?)'", message):
        return _unknown_key(named[1], overrides, command, loader)
    if named := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", message):
        key, _, value = named[1].partition("=")
        if key in LISTS:
            whole = f"{LISTS[key]}=[{value}]"
            return f"{named[1]} has several values; write {whole} for all in one run, or add -m to run each."
        if key in SINGLE:
            return f"{named[1]} has several values; add -m to run each, as in corp {command} -m {named[1]}"
        return f"{named[1]} has several values; add -m to run each, or write '{key}=\"{value}\"' for one."
    if named := re.match(r"Could not append to config. An item is already at '(.+?)'", message):
        return f"{named[1]} is there already; leave out the +."
    if named := re.match(r"Error merging override (.+)", message):
        return _refused_value(named[1], error.__cause__, command, loader)
    if "does not support sweep type" in message:
        return "-m takes lists and ranges only, as in sparsity.joint=0.25,0.5 or seed=range(3)."
    if named := re.match(r"In '(.+?)': \w+ raised while composing config:\n(.+)\n\s+full_key: (.+)", message):
        file, problem, key = named[1].removesuffix(LAID_OVER), named[2], named[3]
        if not problem.startswith("Key "):
            return f"{file}.yaml sets {key} wrongly: {problem}."
        if command == "prune" and file in ("gate/default", "gate/strict"):
            return (
                f"{file.replace('/', '=')} is for corp check, which compares with a baseline; give corp prune limits "
                "such as gate.max_top1_drop=2."
            )
        return f"{file}.yaml sets {key}, which is no key of corp {command}{close_match(key, keys_of(command)) or '.'}"
    if named := re.match(r"provider=hydra.searchpath.*, path=(.*) is not available", message):
        return f"hydra.searchpath names {named[1]}, which is not a folder of configs."
    return _in_short(error)


def close_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?` with the nearest of `known`, or an empty string when nothing is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def keys_of(command: str) -> list[str]:
    """Every key that `corp <command>` takes, dotted, in the order of the schema."""
    keys = []
    for item in fields(COMMANDS[command].schema):
        section: Any = item.default_factory
        within = [f".{key.name}" for key in fields(section)] if is_dataclass(section) else [""]
        keys += [f"{item.name}{key}" for key in within]
    return keys


def _choices_made(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_sweep_override() and not override.is_delete():
            yield override.key_or_group, override.get_value_element_as_str()


def _lists_given(overrides: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value() if not override.is_sweep_override() else None
        if isinstance(value, list):
            yield override.key_or_group, value


def _one_of(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _unreadable(override: str, command: str, overrides: Sequence[str], loader: ConfigLoader) -> str:
    key, equals, value = override.partition("=")
    if whole := meant.without_spaces(override, overrides):
        return f"{override} is cut short by a space; write {whole}"
    if equals and key.strip():
        return f"{override} cannot be read; quote the value: '{key}=\"{value}\"'."
    hint = close_match(override, keys_of(command)) or f"; see corp {command} --help"
    if command in ("info", "bench", "export"):
        hint = f"; write checkpoint={override}"
    elif typed := meant.bare(override, keys_of(command), loader):
        hint = f"; write {typed}"
    return f"'{override}' is not of the form key=value{hint}"


def _missing_config(error: MissingConfigException, loader: ConfigLoader) -> str:
    name = error.missing_cfg_file or "config"
    group, _, choice = name.rpartition("/")
    hidden = ("_dummy_empty_config_", *(f"{name}_schema" for name in COMMANDS))
    if missing := not_installed(group, choice):
        return missing
    options = [option for option in loader.get_group_options(group) if option not in hidden]
    where = re.match(r"In '(.+?)'", str(error))
    asked = f"{where[1]}.yaml asks for the config {name}, which" if where else f"The config {name}"
    known = f"; choose {_one_of(options)}." if options else "."
    return f"{asked} does not exist{close_match(choice, options) or known}"


def _wrong_choice(group: str, choice: str, options: Sequence[str], command: str) -> str:
    # A choice that is only half alike may be meant for a key: model=deit_tiny_patch16_224, for model.name.
    if near := close_match(choice, options, cutoff=0.75):
        return f"{group}={choice} is not one of {', '.join(options)}{near}"
    keys = [key for key in keys_of(command) if key.startswith(f"{group}.")]
    single = f", or set a single key: {', '.join(keys)}" if keys else ""
    return f"{group}={choice} is not a choice; choose {_one_of(options)}{single}."


def _unknown_key(key: str, overrides: Sequence[str], command: str, loader: ConfigLoader) -> str:
    if key.startswith("hydra"):
        return f"Hydra has no setting {key}; see corp {command} --hydra-help"
    parent, _, leaf = key.rpartition(".")
    keys = keys_of(command)
    if not keys:
        given = next((override for override in overrides if override.startswith(key)), key)
        return f"corp {command} takes no keys; leave out {given}."
    groups = sorted({known.partition(".")[0] for known in keys if "." in known})
    unknown = f"corp {command} has no key {key}"
    if command == key == "export":
        return f"{unknown}; did you mean format?"
    if within := [known for known in keys if known.startswith(f"{key}.")]:
        return f"corp {command} knows no choices of {key}; set a single key: {', '.join(within)}."
    siblings = [known for known in keys if parent and known.startswith(f"{parent}.")]
    found = meant.near(key, siblings or [*groups, *keys], most=1 if siblings else 3)
    if found := found or meant.near(leaf, keys, most=3):
        return f"{unknown}; did you mean {_one_of(found)}?"
    return unknown + (f"; use one of {', '.join(siblings)}." if siblings else f"; corp {command} --help lists all.")


def _refused_value(override: str, cause: BaseException | None, command: str, loader: ConfigLoader) -> str:
    key, _, value = override.lstrip("+~").partition("=")
    if isinstance(cause, ValidationError):
        converted = re.search(r"(?:could not be converted to|is not a valid) (\w+)", str(cause))
        if converted and converted[1] in EXPECTED:
            return f"{key}={value} is not valid; {key} must be {EXPECTED[converted[1]]}."
        if value.startswith("[") and "Cannot convert 'list' to string" in str(cause):
            one, *more = (word.strip() for word in value.strip("[]").split(","))
            each = f", or add -m to run each, as in -m {key}={','.join([one, *more])}" if more else ""
            return f"{key}={value} is a list, and {key} takes one; write {key}={one}{each}."
        if value == "null":
            return f"{key}=null is not valid; {key} must have a value."
        return f"{key}={value} is not valid: {_in_short(cause)}"
    if override.startswith("+"):
        return _unknown_key(key, [override], command, loader)
    return f"{override} is refused: {_in_short(cause)}" if isinstance(cause, Exception) else f"{override} is refused."


def _in_short(error: Exception) -> str:
    """Hydra's own words without its search paths, `full_key` lines and recipes for the shell."""
    text = re.split(r"\n\s*(?:Config search path|Search path|To append|full_key|object_type)", str(error))[0]
    key = getattr(error, "full_key", None)
    short = " ".join(text.split()).rstrip(".")
    if not short and isinstance(error.__cause__, Exception):
        return _in_short(error.__cause__)
    return f"{key}: {short}." if key else f"{short}."
