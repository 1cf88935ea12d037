"""Range checks of config values: each raises CorpError with a sentence that names the key."""

from __future__ import annotations

from corp_cli.errors import CorpError


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise CorpError unless `value` is one of `choices`, naming the key and every choice."""
    if value not in choices:
        raise CorpError(f"{key}={value} is not a choice; use one of {', '.join(choices)}.")


def require_at_least(key: str, value: float, low: float) -> None:
    """Raise CorpError unless `value` >= `low`."""
    if not value >= low:
        raise CorpError(f"{key}={value} is out of range; it must be at least {low:g}.")


def require_fraction(key: str, value: float) -> None:
    """Raise CorpError unless `value` is in [0, 1]."""
    if not 0 <= value <= 1:
        raise CorpError(f"{key}={value:g} is out of range; it must be a fraction from 0 to 1.")
