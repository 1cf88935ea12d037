"""The command line in a test: a run that does nothing, and what a mistake must be answered with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import corp_cli
from corp_cli import commands
from corp_cli.config.prune import PruneConfig

QUICK = [
    "device=cpu",
    "calibration.num_images=64",
    "calibration.num_workers=0",
    "evaluation.num_images=64",
    "evaluation.num_workers=0",
]
UNTIMED = [*QUICK, "evaluation.throughput_batches=0"]


def put_module(
    monkeypatch: pytest.MonkeyPatch, name: str, package: ModuleType = corp_cli, **functions: Callable[..., None]
) -> None:
    """Let `from <package> import <name>` find a module with these functions: no torch, no model."""
    module = ModuleType(f"{package.__name__}.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, name, module, raising=False)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, leaving: str = "") -> None:
    """Let every run raise `error`, after it has written the file `leaving`."""

    def run(cfg: PruneConfig, output_dir: Path, shared: Path | None = None) -> None:
        if leaving:
            (output_dir / leaving).touch()
        raise error

    put_module(monkeypatch, "prune", commands, run=run)


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def one_sentence(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """What was printed is one line on stderr, from corp, that holds `words`."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("corp: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
