"""Jobs in processes of Hydra's launcher plugins: the same table, summary.csv and exit code as without."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from corp_cli.cli.handover import Runner, collect, leave
from corp_cli.cli.job import Job
from corp_cli.cli.main import main
from corp_cli.errors import CorpError, GateError
from corp_cli.files.locks import sole_writer
from corp_cli.models.bundled import BundledModel
from tests.support.typed import UNTIMED

pytestmark = pytest.mark.usefixtures("empty_folder")

LAUNCHERS = {
    "joblib": ("hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"]),
    "submitit_local": ("hydra_submitit_launcher", ["hydra.launcher.timeout_min=5"]),
}


def installed(package: str) -> bool:
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{package}") is not None


@pytest.fixture(params=["joblib", "submitit_local"])
def launcher(request: pytest.FixtureRequest) -> list[str]:
    package, settings = LAUNCHERS[request.param]
    if not installed(package):
        pytest.skip(f"{package} is not installed: pip install '.[launchers]'")
    return [f"hydra/launcher={request.param}", *settings]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def rounded(cell: str) -> Any:
    """What a cell says, within rounding if that is a number: other numbers of threads round differently."""
    try:
        return pytest.approx(float(cell), rel=1e-3)
    except ValueError:
        return cell


def number(cell: str) -> float | str:
    """The same as it is."""
    try:
        return float(cell)
    except ValueError:
        return cell


def tiny_config(model: BundledModel) -> list[str]:
    """The tiny model by its files: what tests put in place of the bundled one is not there in other processes."""
    content = {
        "defaults": ["prune", "_self_"],
        "model": {"name": model.timm_name, "args": model.args, "checkpoint": str(model.weights)},
        "data": {key: model.data[key] for key in ("mean", "std", "crop_pct")},
        "evaluation": {"path": str(model.evaluation)},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(content))
    return ["--config-dir", ".", "--config-name", "tiny"]


@pytest.mark.slow  # processes of both launchers import torch anew
def test_all_jobs_are_in_the_summary_and_calibrate_once(
    launcher: list[str], tiny_model: BundledModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two good jobs and a mistake, as with the basic launcher."""
    Path("there").symlink_to(tiny_model.calibration.parent)
    images = [str(tiny_model.calibration), f"there/{tiny_model.calibration.name}", "nowhere"]
    argv = ["prune", "-m", *tiny_config(tiny_model), *UNTIMED, f"calibration.path={','.join(images)}"]
    outcomes = {}
    for name, added in (("basic", []), ("plugin", launcher)):
        code = main([*argv, *added, f"hydra.sweep.dir={name}"])
        said = capfd.readouterr()
        errors = [line for line in said.err.splitlines() if "corp: job" in line]
        table = said.out[said.out.rindex("overrides") :].splitlines()
        outcomes[name] = read(Path(name, "summary.csv")), (code, errors, len(table))
        logs = [path.read_text() for path in Path(name, ".submitit").rglob("*.err")]
        assert "".join([said.err, *logs]).count("statistics of 64 images read from") == 1
        assert not Path(name, ".shared").exists()
    rows, (code, errors, _) = outcomes["plugin"]
    assert outcomes["basic"][1] == outcomes["plugin"][1]
    for basic, row in zip(outcomes["basic"][0], rows, strict=True):
        assert {name: number(cell) for name, cell in row.items()} == {name: rounded(basic[name]) for name in basic}
    assert code == 2
    assert [row["status"] for row in rows] == ["ok", "ok", "failed"]
    assert "nowhere does not exist" in rows[2]["error"]
    assert len(errors) == 1


@pytest.mark.parametrize("launcher", ["joblib"], indirect=True)
def test_other_commands_tell_the_errors_of_their_jobs(
    launcher: list[str], tiny_model: BundledModel, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "-m", *launcher, f"checkpoint={tiny_model.weights}", "seed=1,2", "hydra.sweep.dir=sweep"]
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.count("corp: job 0 (") == err.count("corp: job 1 (") == 1


JOB = Job(3, "seed=1", Path("sweep/3").absolute(), "job 3 (seed=1): ", False)


def bug() -> Exception:
    return type("OddError", (Exception,), {})("odd")


@pytest.mark.parametrize(
    ("error", "status"), [(None, False), (CorpError("no\nluck."), True), (GateError("worse."), False), (bug(), True)]
)
def test_what_came_of_a_job_is_handed_over(tmp_path: Path, error: Exception | None, status: bool) -> None:
    job = replace(JOB, error=error)
    leave(JOB, tmp_path, ended=False)
    leave(job, tmp_path, ended=True)
    ((found,), going_on) = collect(tmp_path)
    assert not going_on
    assert replace(found, error=None) == JOB
    assert found.failed is status
    assert (type(found.error).__name__, found.said) == (type(error).__name__, job.said)
    assert isinstance(found.error, CorpError) == isinstance(error, CorpError)


def test_job_whose_process_is_killed_has_failed_and_one_that_writes_goes_on(tmp_path: Path) -> None:
    dead, alive = replace(JOB, output_dir=tmp_path / "dead"), replace(JOB, number=4, output_dir=tmp_path / "alive")
    for job in (dead, alive):
        leave(job, tmp_path, ended=False)
    code = "import sys, os, pathlib; from corp_cli.files.locks import sole_writer\n"
    code += "with sole_writer(pathlib.Path(sys.argv[1])): os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(dead.output_dir)], check=False)
    assert (dead.output_dir / ".corp.lock").exists()
    with sole_writer(alive.output_dir):
        ((found,), (going_on,)) = collect(tmp_path)
    assert found.number == 3
    assert "ended before the job was done" in str(found.said)
    assert going_on.number == 4


def test_sweep_that_ends_early_tells_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that gives up when a process dies: its jobs have rows, and the cache of those that go on stays."""

    def launch(runner: Runner) -> Callable[[], None]:
        def run() -> None:
            assert runner.task.shared is not None
            leave(replace(JOB, number=0, where="job 0: "), runner.task.shared, ended=False)
            leave(replace(JOB, number=1, output_dir=Path("sweep/1").absolute()), runner.task.shared, ended=True)
            raise RuntimeError("A process is gone\nits log follows")

        return run

    monkeypatch.setattr("hydra.main", lambda **_: launch)
    assert main(["prune", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "corp: warning: the sweep ended early: A process is gone."
    assert error.startswith("corp: job 0: its process ended")
    assert [row["status"] for row in read(Path("sweep/summary.csv"))] == ["failed", "ok"]
    assert not Path("sweep/.shared").exists()
