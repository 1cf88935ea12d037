"""Range checks of fields of a config section: of every item of a list, and not of None where that is the default.

Each raises CorpError with a sentence that names the key: the field's name behind `prefix`.
"""

from __future__ import annotations

from typing import Any

from corp_cli.errors import CorpError

MOST = 10**9
MOST_OF = {
    "batch_size": 2**16,
    "batch_sizes": 2**16,
    "latency_batch_size": 2**16,
    "num_workers": 1024,
    "ridge_lambda": 10**6,
    "class_token_weight": 10**6,
    "seed": 2**63 - 1,  # what a generator of torch takes
}


def require_choice(prefix: str, section: Any, **choices: tuple[str, ...]) -> None:
    """Raise CorpError unless every field named is one of its choices."""
    for name, allowed in choices.items():
        for value in given(section, name):
            if value not in allowed:
                raise CorpError(f"{prefix}{name}={value} is not a choice; use one of {', '.join(allowed)}.")


def require_at_least(prefix: str, section: Any, **lows: float) -> None:
    """Raise CorpError unless every field named is at least its bound, and at most what makes sense."""
    for name, low in lows.items():
        most = MOST_OF.get(name, MOST)
        for value in given(section, name):
            if not value >= low:
                raise CorpError(f"{prefix}{name}={value} is out of range; it must be at least {low:g}.")
            if value > most:
                raise CorpError(f"{prefix}{name}={value} is out of range; it must be from {low:g} to {most}.")


def require_fraction(prefix: str, section: Any, *names: str) -> None:
    """Raise CorpError unless every field named is in [0, 1]."""
    for name in names:
        for value in given(section, name):
            if not 0 <= value <= 1:
                raise CorpError(f"{prefix}{name}={value:g} is out of range; it must be a fraction from 0 to 1.")


def require_texts(key: str, value: Any) -> None:
    """Raise CorpError unless a value is a text, several of them in a list, or None."""
    several = value if isinstance(value, list) else [value] if value is not None else []
    if value == [] or not all(isinstance(one, str) and one for one in several):
        raise CorpError(f"{key}={value} is not a path; write one, or several as in '{key}=[photos,more]'.")


def words(key: str, value: Any, allowed: tuple[str, ...]) -> list[Any]:
    """The items of a list, or the only one, written without brackets. Raises CorpError for what is neither."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise CorpError(
            f"{key}={'null' if value is None else value} is not a list; write one or several of {', '.join(allowed)}, "
            f"as in {key}=[{allowed[0]},{allowed[1]}]."
        )
    return value


def given(section: Any, name: str) -> list[Any]:
    """The values of a field: those of a list, none of one that may be None and is, or the one that it has."""
    value: Any = getattr(section, name)
    if not hasattr(type(section), name):  # a dataclass makes lists anew, so that the class has no default
        return list(value)
    may_be_none = getattr(type(section), name) is None
    return [] if value is None and may_be_none else [value]
