"""Range checks of config values: each raises CorpError with a sentence that names the key."""

from __future__ import annotations

from corp_cli.errors import CorpError

MOST = 10**9  # of a count
MOST_WEIGHT = 10**6  # of a factor, such as a ridge
MOST_BATCH = 2**16  # images in a batch
MOST_WORKERS = 1024
MOST_SEED = 2**63 - 1  # what a generator of torch and an integer of YAML readers take


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise CorpError unless `value` is one of `choices`, naming the key and every choice."""
    if value not in choices:
        raise CorpError(f"{key}={value} is not a choice; use one of {', '.join(choices)}.")


def require_at_least(key: str, value: float, low: float, high: int = MOST) -> None:
    """Raise CorpError unless `low` <= `value` <= `high`, which is there to catch slips and infinity."""
    if not value >= low:
        raise CorpError(f"{key}={value} is out of range; it must be at least {low:g}.")
    if value > high:
        raise CorpError(f"{key}={value} is out of range; it must be from {low:g} to {high}.")


def require_fraction(key: str, value: float) -> None:
    """Raise CorpError unless `value` is in [0, 1]."""
    if not 0 <= value <= 1:
        raise CorpError(f"{key}={value:g} is out of range; it must be a fraction from 0 to 1.")
