"""What a report.json or an evaluation.json says of one pruned model, as far as it is compared. Reads no files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.output import REPORT
from corp_cli.report.schema import EVALUATION, SCHEMA_VERSION

Pair = tuple[str, str]
LARGEST = sys.float_info.max  # beyond it are infinity, integers that no float holds, and NaN compares with nothing
MACHINE = ("device", "device_name", "cpu_count", "cpu_capability", "torch_threads")


@dataclass(frozen=True)
class Layout:
    """Where one kind of file keeps, as dotted paths, what must be the same in both files, and the figures."""

    command: str
    same: dict[str, str]
    figures: dict[str, str]


def layout(command: str, images: str, results: Pair, size: Pair, speed: Pair) -> Layout:
    """Of the paths of the images and, each for the model itself and the dense one, of results, size and speed."""
    figures: dict[str, str] = {}
    for prefix, result, count, name in zip(("", "dense_"), results, size, speed, strict=True):
        keys = ("top1", "top5") if prefix else ("top1", "top5", "agreement", "kl")  # fidelity is to the dense model
        figures |= {f"{prefix}{key}": f"{result}.{key}" for key in keys}
        figures |= {f"{prefix}macs": f"{count}.macs", f"{prefix}params": f"{count}.parameters"}
        figures[f"{prefix}throughput"] = f"throughput.images_per_second.{name}"
    same = {
        "architecture": "model.timm_name",
        "weights": "model.dense_sha256",
        "preparation": "model.data",
        "images": f"{images}.list_sha256",
        "labels": f"{images}.labelled_images",
    }
    return Layout(command, same, figures)


LAYOUTS = {
    REPORT: layout(
        "corp prune",
        "evaluation",
        results=("evaluation.pruned", "evaluation.dense"),
        size=("size.pruned", "size.dense"),
        speed=("pruned", "dense"),
    ),
    EVALUATION: layout(
        "corp evaluate",
        "images",
        results=("results.model", "results.reference"),
        size=("model", "reference"),
        speed=("model", "reference"),
    ),
}


@dataclass(frozen=True)
class Measured:
    """What a file says of one model; a figure that was not measured is None."""

    name: str  # of the file, for messages
    kind: str
    same: dict[str, Any]
    figures: dict[str, float | None]
    machine: tuple[Any, ...]


def measured(content: Any, name: str) -> Measured:
    """What the JSON `content` of the file `name` says. Raises CorpError where it is no report of this version."""
    kind = REPORT if at(content, "results") is None else EVALUATION
    layout = LAYOUTS[kind]
    version = at(content, "schema_version")
    if version is None or at(content, layout.same["architecture"]) is None:
        raise CorpError(
            f"{name} is not a report; give a report.json of corp prune or an evaluation.json of corp evaluate."
        )
    if version != SCHEMA_VERSION:
        raise CorpError(
            f"{name} has schema_version {version} and this corp compares {SCHEMA_VERSION}; write it again with this "
            "corp, or use the corp that wrote it."
        )
    same = {what: at(content, path) for what, path in layout.same.items()}
    for what, path in layout.same.items():
        if same[what] is None and not (kind == EVALUATION and what == "weights"):  # null for a dense model
            raise CorpError(f"{name} lacks {path}; give the whole {kind}, as {layout.command} wrote it.")
    figures = {figure: number(content, path, name) for figure, path in layout.figures.items()}
    fast, slow = figures["throughput"], figures["dense_throughput"]
    figures["speedup"] = fast / slow if fast and slow else None
    return Measured(name, kind, same, figures, tuple(at(content, f"environment.{key}") for key in MACHINE))


def at(content: Any, path: str) -> Any:
    """What stands at the dotted `path`, or None where there is no such field."""
    for key in path.split("."):
        content = content.get(key) if isinstance(content, dict) else None
    return content


def number(content: Any, path: str, name: str) -> float | None:
    """The finite number at `path`; None where it was not measured."""
    value = at(content, path)
    if value is None or (type(value) in (int, float) and abs(value) <= LARGEST):
        return value
    raise CorpError(f"{name} has {path}={value}, which is not a number; give the file as corp wrote it.")
