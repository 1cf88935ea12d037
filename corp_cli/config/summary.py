"""The schema of `corp summary`. Imports neither torch nor timm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from corp_cli.errors import CorpError


@dataclass
class SummaryConfig:
    """Everything `corp summary` can be told."""

    folder: Optional[str] = None  # with runs of corp prune anywhere below it

    def __post_init__(self) -> None:
        if self.folder is None:
            raise CorpError("Say which folder to look for runs in: corp summary outputs")
