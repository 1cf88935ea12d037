"""`corp prune`: prune, write, show what was found, and hold it against the limits that were asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.blocks import remove_state
from corp_cli.files.output import STATE, rounded
from corp_cli.pipeline import prune
from corp_cli.report.gate import require_within
from corp_cli.report.summary import show
from corp_cli.runtime.memory import plain_memory_errors


def run(cfg: PruneConfig, output_dir: Path, cache: Path | None = None) -> None:
    """`corp prune`: prune, write, and show what was found. Raises GateError where a limit of `cfg.gate` is broken.

    What an interrupted run has done stays in `output_dir`.
    """
    state = output_dir / STATE
    try:
        with plain_memory_errors():
            report = prune(cfg, output_dir, cache, state).report
    except CorpError:
        remove_state(state)
        raise
    remove_state(state)
    show(report, output_dir)
    require_within(cfg.gate, rounded(asdict(report)), str(output_dir))
