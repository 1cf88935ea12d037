"""The schema of `corp push`. Imports neither torch nor the hub's client."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from corp_cli.errors import CorpError

PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
REPOSITORY = re.compile(rf"{PART}/{PART}", re.ASCII)
LONGEST = 96  # characters of a repository that the hub takes


@dataclass
class PushConfig:
    """Everything `corp push` can be told. Who pushes is known from `hf auth login` or HF_TOKEN, never from a key."""

    repo: Optional[str] = None  # owner/name
    checkpoint: Optional[str] = None  # a pruned.safetensors; report.json beside it goes along
    folder: Optional[str] = None  # where the files are kept; null: nowhere
    private: bool = True  # of a repository that is made now
    license: Optional[str] = None  # of the dense weights; null: what timm or the hub says
    base_model: Optional[str] = None  # the dense model on the hub; null: as the report says
    dry_run: bool = False  # write the files into `folder`, and upload nothing

    def __post_init__(self) -> None:
        if self.repo is None or self.checkpoint is None:
            raise CorpError("Say what to push and where to: corp push owner/name checkpoint=path/to/pruned.safetensors")
        for key in ("repo", "base_model"):
            if (value := getattr(self, key)) is not None and not is_repository(value):
                raise CorpError(
                    f"{key}={value} is no repository of the hub; write owner/name, each of letters, digits, '-', '_' "
                    "and '.'."
                )
        if self.dry_run and self.folder is None:
            raise CorpError("A dry run uploads nothing; say where to write the files instead: folder=FOLDER.")


def is_repository(name: str) -> bool:
    """Whether the hub could have a repository of this name, with its owner."""
    dots = "--" in name or ".." in name or name.endswith(".git")
    return bool(REPOSITORY.fullmatch(name)) and len(name) <= LONGEST and not dots
