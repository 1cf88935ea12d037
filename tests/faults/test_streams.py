"""Streams that cannot be written, and names that would steer the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corp_cli.cli import voice
from corp_cli.cli.main import main
from corp_cli.config.prune import PruneConfig
from corp_cli.prepare.work import Given, Work, prepare
from corp_cli.runtime import console
from tests.support.typed import UNTIMED

STEERING = "a\x1b[31m\x07b\x9bc.png"


def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.warn(f"{STEERING} cannot be read")
    console.out().print(STEERING, markup=False)
    main([STEERING])
    said = "".join(capsys.readouterr())
    assert said.count("a[31mbc.png") == 3
    assert not set(said) & {"\x1b", "\x07", "\x9b"}


def test_what_cannot_be_encoded_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    voice.usable_streams()
    console.out().print("Wrote it to /übung/\udcff", markup=False)
    assert raw.getvalue() == b"Wrote it to /\\xfcbung/\\udcff\n"


def test_a_line_that_cannot_be_printed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console.out().print("Wrote it.")
        assert console.lost()
        assert not console.lost()


@pytest.mark.usefixtures("tiny_digits")
def test_a_working_folder_that_goes_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, run = tmp_path / "gone", tmp_path / "run"
    gone.mkdir()

    def prepared(cfg: PruneConfig, given: Given | None) -> Work:
        work = prepare(cfg, given)
        gone.rmdir()
        return work

    monkeypatch.chdir(gone)
    monkeypatch.setattr("corp_cli.pipeline.prepare", prepared)
    argv = ["prune", *UNTIMED, f"hydra.run.dir={run}"]
    assert main(argv) == 0
    assert {path.name for path in run.iterdir()} == {
        *(".hydra", "plan.yaml", "prune.log", "pruned.safetensors", "report.html", "report.json"),
    }
    assert main(argv) == 2
    assert "The current folder is there no more" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "code"), [(">/dev/full", 1), (">&-", 0), ("2>&-", 0)])
def test_the_exit_code_where_stdout_is_the_result(to: str, code: int) -> None:
    command = f'exec "{sys.executable}" -m corp_cli --version {to}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == code
    assert done.stderr == ("corp: cannot write to stdout: No space left on device.\n" if code else "")
