"""Warnings, on stderr and once in the report; progress, a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from corp_cli.runtime import console
from corp_cli.runtime.console import Stopwatch, collect_warnings, duration, roughly, track, warn


def test_a_warning_is_said_and_kept_once(capsys: pytest.CaptureFixture[str]) -> None:
    collected = collect_warnings()
    warn("two images cannot be read")
    warn("two images  cannot be read")
    assert collected == ["two images cannot be read"]
    assert capsys.readouterr().err.count("cannot be read") == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only the test moves."""
    now = SimpleNamespace(seconds=0.0)
    fake = SimpleNamespace(monotonic=lambda: now.seconds, perf_counter=lambda: now.seconds)
    monkeypatch.setattr(console, "time", fake)
    return now


@pytest.mark.parametrize(("seconds", "lines"), [(40.0, 9), (10.0, 3), (2.9, 0)])
def test_plain_lines_come_at_most_every_thirty_seconds(
    seconds: float, lines: int, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in track(range(10), "curves", 10):
        clock.seconds += seconds
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("corp: curves ") and line.endswith(" left") for line in said)


def test_progress_counts_what_each_item_holds(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in track(range(4), "calibrate", 100, 32):
        clock.seconds += 31
    assert capsys.readouterr().err.splitlines() == [
        "corp: calibrate 32/100, about 1 min 6 s left",
        "corp: calibrate 64/100, about 35 s left",
        "corp: calibrate 96/100, about 3.9 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4, "a few seconds"),
        (44, "40 s"),
        (56, "1 min"),
        (260, "4 min"),
        (3560, "59 min"),
        (7000, "2 h"),
        (4900, "1 h 20 min"),
    ],
)
def test_estimates_are_said_without_false_precision(seconds: float, said: str) -> None:
    assert roughly(seconds).removeprefix("about ") == said


def test_time_left_in_all_goes_by_the_pace_so_far(clock: SimpleNamespace) -> None:
    watch = Stopwatch(("load", "calibrate", "rank", "compensate", "export"))
    assert watch.left("load", 0, 0) is None  # nothing is known yet
    watch.expected |= {"calibrate": 10.0, "rank": 2.0, "compensate": 30.0}
    assert watch.left("calibrate", 4, 0) == 6 + 32
    assert watch.left("calibrate", 4, 11) == 11 + 32  # what is counted knows better
    with watch("calibrate"):
        clock.seconds += 20  # twice what was expected
    assert watch.left("rank", 1, 0) == 3 + 60
    with watch("rank"):
        clock.seconds += 0.1  # a cache had it
    assert watch.left("compensate", 70, 0) == 0
    assert watch.left("compensate", 70, 5) == 5
    assert watch.left("export", 0, 0) is None


def test_stages_add_up(clock: SimpleNamespace) -> None:
    watch = Stopwatch()
    for seconds in (1.0, 2.0):
        with watch("rank"):
            clock.seconds += seconds
    assert watch.seconds == {"rank": 3.0}


# --- as a terminal sees it ------------------------------------------------------------------------------------

SHOW = """
import time
from corp_cli.runtime import console
for _ in console.track(range(4), "calibrate", 4):
    time.sleep(0.1)
console.warn("careful")
"""
COMMAND = [sys.executable, "-c", SHOW]
COLOUR = re.compile(r"\x1b\[(\d+;)*([39][0-7]|38)[;m]")


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return {**kept, "TERM": "xterm", **variables}


def on_terminal(program: str = SHOW, **variables: str) -> str:
    """What a program writes to a terminal."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment(**variables)
    ) as run:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal so
            while chunk := os.read(ours, 4096):
                said += chunk
    os.close(ours)
    assert run.returncode == 0, said
    return said.decode()


def test_a_terminal_gets_a_bar_with_the_time_left_and_colours() -> None:
    said = on_terminal()
    assert re.search(r"calibrate .*4/4.*0:00:0\d", said)
    assert COLOUR.search(said)
    assert "careful" in said


STAGES = """
import time
from corp_cli.runtime import console
watch = console.Stopwatch(("load", "calibrate"))
with watch("load"):
    time.sleep(0.3)
with watch("calibrate"):
    for _ in console.track(range(4), "images", 4):
        time.sleep(0.2)
    print("between")
    time.sleep(0.3)
"""


def test_a_terminal_sees_which_stage_of_how_many_it_is_in() -> None:
    said = on_terminal(program=STAGES)
    assert re.search(r"stage 1 of 2: load.*0:00:00", said)
    assert re.search(r"stage 2 of 2: calibrate, images.*3/4, 0\.\d s left", said)
    assert re.search(r"between\r\n.*stage 2 of 2: calibrate ", said, re.DOTALL)


OUTLOOK = """
import time
from corp_cli.runtime import console
watch = console.Stopwatch(("load", "calibrate", "rank"))
with watch("load"):
    watch.expected |= {"calibrate": 100.0, "rank": 140.0}
with watch("calibrate"):
    for _ in console.track(range(2), "images", 2):
        time.sleep(0.2)
    time.sleep(1.2)
"""


def test_a_terminal_sees_the_time_left_in_all_and_that_time_goes_on_when_nothing_is_counted() -> None:
    said = on_terminal(program=OUTLOOK)
    assert "left in all" not in said.partition("calibrate")[0]
    assert re.search(r"stage 2 of 3: calibrate, images.*1/2, 0\.\d s left; about 4 min left in all", said)
    assert re.search(r"stage 2 of 3: calibrate [^,\n]*about 4 min left in all.*0:00:01", said)


def test_a_terminal_sees_that_a_program_starts(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import time; from corp_cli.runtime import console\nwith console.busy('starting'): time.sleep(0.2)"
    assert "starting" in on_terminal(program=program)
    with console.busy("starting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_plain_lines_say_the_stage(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Stopwatch(("load", "calibrate"))
    with watch("calibrate"):
        for _ in track(range(2), "images", 2):
            clock.seconds += 40
    assert capsys.readouterr().err == "corp: stage 2 of 2, images 1/2, about 40 s left\n"


def test_no_color_is_respected() -> None:
    said = on_terminal(NO_COLOR="1")
    assert "4/4" in said  # the bar stays
    assert not COLOUR.search(said)


def test_a_dumb_terminal_gets_no_control_characters() -> None:
    assert on_terminal(TERM="dumb") == "corp: warning: careful\r\n"


def test_a_pipe_gets_plain_text() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(), check=True)
    assert (done.stdout, done.stderr) == ("", "corp: warning: careful\n")


def test_colours_that_are_forced_bring_no_bar_into_a_file() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(FORCE_COLOR="1"), check=True)
    assert COLOUR.search(done.stderr)
    assert "calibrate" not in done.stderr
