"""Warnings: on stderr, and once in the report."""

from __future__ import annotations

import pytest

from corp_cli.console import collect_warnings, warn


def test_a_warning_is_said_and_kept_once(capsys: pytest.CaptureFixture[str]) -> None:
    collected = collect_warnings()
    warn("two images cannot be read")
    warn("two images  cannot be read")
    assert collected == ["two images cannot be read"]
    assert capsys.readouterr().err.count("cannot be read") == 1
