"""Range checks of fields of a config section: of every item of a list, and not of None where that is the default.

Each raises CorpError with a sentence that names the key: the field's name behind `prefix`.
"""

from __future__ import annotations

from typing import Any

from corp_cli.errors import CorpError


def require_choice(prefix: str, section: Any, **choices: tuple[str, ...]) -> None:
    """Raise CorpError unless every field named is one of its choices."""
    for name, allowed in choices.items():
        for value in given(section, name):
            if value not in allowed:
                raise CorpError(f"{prefix}{name}={value} is not a choice; use one of {', '.join(allowed)}.")


def require_at_least(prefix: str, section: Any, **lows: float) -> None:
    """Raise CorpError unless every field named is at least its bound."""
    for name, low in lows.items():
        for value in given(section, name):
            if not value >= low:
                raise CorpError(f"{prefix}{name}={value} is out of range; it must be at least {low:g}.")


def require_fraction(prefix: str, section: Any, *names: str) -> None:
    """Raise CorpError unless every field named is in [0, 1]."""
    for name in names:
        for value in given(section, name):
            if not 0 <= value <= 1:
                raise CorpError(f"{prefix}{name}={value:g} is out of range; it must be a fraction from 0 to 1.")


def given(section: Any, name: str) -> list[Any]:
    """The values of a field: those of a list, none of one that may be None and is, or the one that it has."""
    value: Any = getattr(section, name)
    if not hasattr(type(section), name):  # a dataclass makes lists anew, so that the class has no default
        return list(value)
    may_be_none = getattr(type(section), name) is None
    return [] if value is None and may_be_none else [value]
