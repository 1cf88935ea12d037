"""The schema of what a run hands on besides its files: a number for Hydra's sweepers, and figures for trackers.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

from typing import Any

from corp_cli.errors import CorpError

OBJECTIVES = {  # name → which of two is better
    "top1": "maximize",
    "agreement": "maximize",
    "kl": "minimize",
    "macs": "minimize",
    "parameters": "minimize",
    "latency": "minimize",
}
OF_CLASSES = ("top1", "agreement", "kl")  # what only a model with a classifier has
TRACKERS = ("tensorboard", "wandb", "mlflow")


def names_in(value: Any) -> list[str]:
    """The names that a key holds which takes one, several in a list, or null or none for none of them."""
    return [] if value in (None, "none") else value if isinstance(value, list) else [value]


def require_outcome(objective: Any, track: Any, timed: bool) -> None:
    """Raise CorpError unless the keys `objective` and `track` hold what there is; `timed`: whether models are."""
    for key, value, known, most in (("objective", objective, OBJECTIVES, 2), ("track", track, TRACKERS, len(TRACKERS))):
        names = names_in(value)
        unknown = [name for name in names if name not in known]
        if unknown or value == []:
            shown = f"{key}={unknown[0]}" if unknown else f"{key}=[]"
            raise CorpError(f"{shown} is not a choice; use one of {', '.join(known)}, or none.")
        if len({*names}) < len(names) or len(names) > most:
            raise CorpError(f"{key}=[{','.join(names)}] is not a choice; give at most {most}, each once.")
    if "latency" in names_in(objective) and not timed:
        raise CorpError(
            "objective=latency needs a timing, which evaluation.throughput_batches=0 leaves out; set it above 0."
        )
