"""What an argument that is none was probably meant for."""

from __future__ import annotations

import pytest

from corp_cli.cli.meant import ALIASES, flag, near, without_spaces
from corp_cli.cli.messages import keys_of

KEYS = keys_of("prune")


@pytest.mark.parametrize(
    ("words", "at", "whole"),
    [
        (["a.b=0.25,", "0.5"], 0, "a.b=0.25,0.5"),
        (["c=1", "a.b=0.25", ",0.5", "d=2"], 2, "a.b=0.25,0.5"),
        (["a.b", "=", "0.5"], 0, "a.b=0.5"),
        (["a.b", "=", "0.5"], 2, "a.b=0.5"),
        (["a.b=", "0.5"], 1, "a.b=0.5"),
        (["a.b", "=0.5"], 0, "a.b=0.5"),
        (["a.b = 0.5"], 0, "a.b=0.5"),
        (["a.b=[1", "c=2"], 0, None),
        (["word"], 0, None),
    ],
)
def test_what_spaces_have_cut_is_joined(words: list[str], at: int, whole: str | None) -> None:
    assert without_spaces(words[at], words) == whole


def test_aliases_are_of_keys_that_there_are() -> None:
    for word, key in ALIASES.items():
        assert key in KEYS or key.startswith("hydra.")
        assert word not in {known.rpartition(".")[2] for known in KEYS}
        assert near(word, KEYS) == [key]


def test_a_flag_is_typed_as_a_key() -> None:
    assert flag("unrecognized arguments: --batch-size 8", ["--batch-size", "8"], KEYS) == (
        "calibration.batch_size=8 or evaluation.batch_size=8"
    )
    assert flag("unrecognized arguments: --seed=3", ["x=1", "--seed=3"], KEYS) == "seed=3"
    assert flag("unrecognized arguments: --joint", ["--joint", "-m"], KEYS) == "sparsity.joint=..."
    assert flag("unrecognized arguments: --zzzzzz", ["--zzzzzz"], KEYS) is None
