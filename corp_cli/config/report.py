"""The schema of `corp report`. Imports neither torch nor Jinja."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from corp_cli.config.outcome import names_in
from corp_cli.errors import CorpError


@dataclass
class ReportConfig:
    """Everything `corp report` can be told."""

    runs: Any = None  # folders with runs of corp prune in them or anywhere below, or their report.json
    output: Optional[str] = None  # the folder to write to; null: the one given, the current one for several

    def __post_init__(self) -> None:
        found = names_in(self.runs)
        if not found or not all(isinstance(one, str) and one for one in found):
            raise CorpError("Say which runs to show: corp report outputs, or several folders.")
