"""Prune vision transformers in one shot, from Python: `prune_model(model, images)`, or `prune(load_config(...))`.

Importing this package imports no torch: the names below are looked up when they are first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from corp_cli.errors import CorpError
from corp_cli.version import __version__

if TYPE_CHECKING:
    from corp_cli.cli.compose import load_config
    from corp_cli.export.timm_entry import register
    from corp_cli.files.checkpoint import load_pruned, save_pruned
    from corp_cli.live import prune_model
    from corp_cli.pipeline import PruneResult, prune

__all__ = [
    "CorpError",
    "PruneResult",
    "__version__",
    "load_config",
    "load_pruned",
    "prune",
    "prune_model",
    "register",
    "save_pruned",
]

_HOMES = {
    "PruneResult": "corp_cli.pipeline",
    "load_config": "corp_cli.cli.compose",
    "load_pruned": "corp_cli.files.checkpoint",
    "prune": "corp_cli.pipeline",
    "prune_model": "corp_cli.live",
    "register": "corp_cli.export.timm_entry",
    "save_pruned": "corp_cli.files.checkpoint",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is logged is seen only where a program asks for it


def __getattr__(name: str) -> Any:
    """The export `name`, from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The exports, also those not yet imported."""
    return sorted({*globals(), *__all__})
