"""`corp prune`: prune, write, show what was found, and hold it against the limits that were asked for."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from corp_cli.commands import dry_run
from corp_cli.commands.estimate import expected_seconds
from corp_cli.config.outcome import names_in
from corp_cli.config.prune import PruneConfig
from corp_cli.files.cache.cache import Cache
from corp_cli.files.output import STATE, rounded
from corp_cli.files.owned import claim, clear
from corp_cli.pipeline import prune
from corp_cli.report.gate import require_within
from corp_cli.report.objective import value_of
from corp_cli.report.summary import show
from corp_cli.runtime.console import on_terminal
from corp_cli.runtime.memory import plain_memory_errors


def run(cfg: PruneConfig, output_dir: Path, shared: Path | None = None) -> float | tuple[float, ...] | None:
    """`corp prune`: prune, write, and show what was found → what `cfg.objective` asks for.

    Raises GateError where a limit of `cfg.gate` is broken. What a run has done that ends otherwise stays in
    `output_dir`. shared: a cache of all jobs of a multirun.
    """
    if cfg.dry_run:
        dry_run.run(cfg)
        return None
    state, expect = None, expected_seconds if on_terminal() else None  # short runs, of a few seconds
    with contextlib.suppress(OSError):  # it can do without
        state = claim(output_dir / STATE)
    try:
        with plain_memory_errors():
            report = prune(cfg, output_dir, Cache(shared, state), expect=expect).report
    except BaseException:
        if state is not None and not any(state.glob("*.safetensors")):
            clear(state)
        raise
    if state is not None:
        clear(state)
    show(report, output_dir)
    require_within(cfg.gate, rounded(asdict(report)), str(output_dir))
    return value_of(report, names_in(cfg.objective))


def follow(cfg: PruneConfig) -> None:
    """Take part in a `run` of which another process is the first, which alone writes and shows anything."""
    with plain_memory_errors():
        prune(cfg)
