"""`corp prune`: prune, write, show what was found, and hold it against the limits that were asked for."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from corp_cli.config.prune import PruneConfig
from corp_cli.files.cache.cache import Cache
from corp_cli.files.output import STATE, rounded
from corp_cli.pipeline import prune
from corp_cli.report.gate import require_within
from corp_cli.report.summary import show
from corp_cli.runtime.memory import plain_memory_errors


def run(cfg: PruneConfig, output_dir: Path, cache: Path | None = None) -> None:
    """`corp prune`: prune, write, and show what was found. Raises GateError where a limit of `cfg.gate` is broken.

    What a run has done that is interrupted, or fails, stays in `output_dir`.
    """
    state = output_dir / STATE
    with plain_memory_errors():
        report = prune(cfg, output_dir, Cache(cache, state)).report
    shutil.rmtree(state, ignore_errors=True)
    show(report, output_dir)
    require_within(cfg.gate, rounded(asdict(report)), str(output_dir))
