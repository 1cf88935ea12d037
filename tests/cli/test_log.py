"""The log file of a run: what is in it, when there is none, and that it leaves logging as it was."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from corp_cli import commands
from corp_cli.cli import log
from corp_cli.cli.main import main
from corp_cli.config.checkpoints import BenchConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError, GateError
from corp_cli.pipeline import prune
from corp_cli.runtime.console import Stopwatch, warn
from tests.support.typed import put_module

pytestmark = pytest.mark.usefixtures("tiny_digits")

PACKAGE = logging.getLogger("corp_cli")
QUICK = PruneConfig(device="cpu")
QUICK.calibration.num_images = QUICK.evaluation.num_images = 32
QUICK.evaluation.throughput_batches = 0


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORP_DEBUG", raising=False)


def work_with(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None, command: str = "prune") -> None:
    """Let `corp <command>` warn within a stage, write a file, and then raise `error`."""

    def job(config: PruneConfig | BenchConfig, *folders: Path) -> None:
        with Stopwatch()("rank"):
            warn("100% of it is odd.")
        (folders[0] / "result").touch()
        if error is not None:
            raise error

    put_module(monkeypatch, command, commands, run=job)


def lines(path: str) -> list[str]:
    """Of a log file, each after its time."""
    found = Path(path).read_text("utf-8").splitlines()
    stamped = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (.*)", line) for line in found]
    return [re.sub(r"\d+\.\d s", "1.0 s", match[1]) for match in stamped if match]


def test_stages_warnings_and_where_the_results_are(monkeypatch: pytest.MonkeyPatch) -> None:
    work_with(monkeypatch)
    assert main(["prune", "hydra.run.dir=run", "seed=3"]) == 0
    first, *rest = lines("run/prune.log")
    assert re.fullmatch(r"INFO    corp [\d.]+\S*: corp prune seed=3", first)
    assert rest == [
        "INFO    rank: begins",
        "WARNING 100% of it is odd.",
        "INFO    rank: done in 1.0 s",
        f"INFO    results are in {Path('run').absolute()}",
    ]


def test_every_job_of_a_multirun_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    work_with(monkeypatch)
    assert main(["prune", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert [lines(f"sweep/{job}/prune.log")[0][-6:] for job in (0, 1)] == ["seed=1", "seed=2"]
    assert lines("sweep/0/prune.log")[-1].endswith("/sweep/0")


def test_named_after_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("evaluate", "bench", "export"):
        work_with(monkeypatch, command=command)
        assert main([command, "checkpoint=x", f"hydra.run.dir={command}"]) == 0
        assert lines(f"{command}/{command}.log")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CorpError("no\n luck."), 2, "ERROR   no luck."),
        (GateError("too bad."), 3, "ERROR   too bad."),
        (ZeroDivisionError("by zero"), 1, "ERROR   unexpected error"),
        (KeyboardInterrupt(), 130, "ERROR   interrupted"),
    ],
)
def test_errors_that_end_a_run(error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work_with(monkeypatch, error)
    assert main(["prune", "hydra.run.dir=run"]) == code
    assert lines("run/prune.log")[-1] == said
    text = Path("run/prune.log").read_text()
    assert ("Traceback" in text) == ("ZeroDivisionError: by zero" in text) == (code == 1)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    work_with(monkeypatch)
    assert main(["prune", "hydra.run.dir=run", "hydra/job_logging=none"]) == 0
    assert not list(Path("run").glob("*.log"))


def test_logging_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    work_with(monkeypatch)
    assert main(["prune", "hydra.run.dir=run"]) == 0
    before = Path("run/prune.log").read_bytes()
    assert PACKAGE.level == logging.NOTSET
    assert [type(handler) for handler in PACKAGE.handlers] == [logging.NullHandler]
    capsys.readouterr()
    PACKAGE.error("unheard")
    assert capsys.readouterr() == ("", "")
    assert Path("run/prune.log").read_bytes() == before


def test_as_a_library_no_log_is_written_and_nothing_is_configured() -> None:
    handlers = list(PACKAGE.handlers), list(logging.getLogger().handlers)
    prune(QUICK, Path("out"))
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "plan.yaml",
        "pruned.safetensors",
        "report.html",
        "report.json",
    ]
    assert (PACKAGE.handlers, logging.getLogger().handlers) == handlers


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("path", ["/dev/full", "missing/folder.log"])
def test_a_log_that_cannot_be_written_keeps_quiet(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = log.LogFile(path, delay=True)
    handler.handle(logging.makeLogRecord({"msg": "lost", "level": logging.ERROR}))
    handler.close()
    assert capsys.readouterr() == ("", "")
