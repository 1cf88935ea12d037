"""A report.json that comes back: as the dataclass that it was written from. Imports no torch."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from corp_cli.errors import CorpError
from corp_cli.report.gate_input import at
from corp_cli.report.schema import Report

hints_of = functools.cache(get_type_hints)
PLAUSIBLE = 1e30  # what a number of a report may be, so that sums and shares of them are numbers too
EMPTY = {str: "", int: 0, float: 0.0, bool: False}  # in place of what an older corp did not write
NEEDED = tuple(f"size.{model}.{what}" for model in ("dense", "pruned") for what in ("parameters", "macs"))


def report_of(content: Any, name: str) -> Report:
    """The report that the JSON `content` of the file `name` holds; what an older corp did not write is None or empty.

    Raises CorpError where a field is of another type, or a size is missing.
    """
    for path in NEEDED:
        if not at(content, path):
            raise CorpError(f"{name} lacks {path}; give the whole report.json, as corp prune wrote it.")
    report: Report = _as(Report, content, name, "")
    return report


def _as(kind: Any, value: Any, name: str, path: str) -> Any:
    """`value`, which stands at `path`, as a `kind`, which is what the annotation of a field says."""
    args, wrong = get_args(kind), CorpError(f"{name} has a {path} that corp did not write; give the file as it was.")
    if kind is Any or get_origin(kind) is Literal:
        return value
    if type(None) in args:
        return None if value is None else _as(args[0], value, name, path)
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict | NoneType):
            raise wrong
        hints, given = hints_of(kind), value or {}
        found = {
            one.name: (hints[one.name], given.get(one.name), f"{path}.{one.name}".lstrip(".")) for one in fields(kind)
        }
        return kind(**{key: _as(hint, item, name, place) for key, (hint, item, place) in found.items()})
    container = get_origin(kind)
    if container is dict:
        if not isinstance(value, dict | NoneType):
            raise wrong
        return {key: _as(args[1], item, name, f"{path}.{key}") for key, item in (value or {}).items()}
    if container in (list, tuple):
        if not isinstance(value, list | NoneType):
            raise wrong
        return [_as(args[0], item, name, f"{path}[{i}]") for i, item in enumerate(value or [])]
    if value is None:
        return EMPTY[kind]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise wrong
    if kind in (int, float) and not abs(value) <= PLAUSIBLE:  # which NaN is not
        raise wrong
    return float(value) if kind is float else value
