"""`track=`: the report's figures in every tracker that is installed, offline; and what is said where it is not."""

from __future__ import annotations

import json
import socket
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli.main import main
from corp_cli.report import track
from tests.support.typed import QUICK, UNTIMED, one_sentence

# What trackers warn of is theirs to mend.
pytestmark = [pytest.mark.usefixtures("tiny_digits", "empty_folder", "offline"), pytest.mark.filterwarnings("default")]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine: trackers write files, and a connection of this process to another is an error."""
    connect = socket.socket.connect

    def local(one: socket.socket, address: Any) -> None:
        assert one.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        connect(one, address)

    monkeypatch.setattr(socket.socket, "connect", local)
    variables = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    variables |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    variables |= {"MLFLOW_TRACKING_URI": f"sqlite:///{Path('mlflow.db').absolute()}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def tracked(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The report of a run with track=`name`, which warned of nothing."""
    argv = [*QUICK, "sparsity.joint=0.5", "recipe=paper", "evaluation.throughput_batches=1", "hydra.run.dir=run"]
    assert main(["prune", *argv, f"track={name}"]) == 0
    assert "corp: warning" not in capsys.readouterr().err
    report: dict[str, Any] = json.loads(Path("run/report.json").read_text())
    return report


def test_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    report = tracked("tensorboard", capsys)
    events = EventMultiplexer().AddRunsFromDirectory("run/tensorboard")
    events.Reload()
    (run,) = events.Runs()

    def values(tag: str) -> list[float]:
        return [event.value for event in events.Scalars(run, tag)]

    assert values("pruned/top1") == pytest.approx([report["evaluation"]["pruned"]["top1"]])
    assert values("pruned/macs") == pytest.approx([report["size"]["pruned"]["macs"]])
    assert values("speedup") == pytest.approx([report["throughput"]["speedup"]], rel=1e-4)
    assert values("seconds/compensate") == pytest.approx([report["stage_seconds"]["compensate"]], rel=1e-4)
    errors = [block["reconstruction_error"]["mlp"]["after"] for block in report["blocks"]]
    assert values("error_mlp/after") == pytest.approx(errors, rel=1e-4)


def test_mlflow(capsys: pytest.CaptureFixture[str]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny without its database: pip install mlflow")
    report = tracked("mlflow", capsys)
    (run,) = mlflow.search_runs(experiment_names=["corp"], output_format="list")
    metrics, params = run.data.metrics, run.data.params
    assert metrics["pruned/top1"] == pytest.approx(report["evaluation"]["pruned"]["top1"], rel=1e-4)
    assert metrics["images_per_second/pruned"] == pytest.approx(
        report["throughput"]["images_per_second"]["pruned"], rel=1e-4
    )
    assert metrics["removed_percent/macs"] == pytest.approx(report["size"]["removed_percent"]["macs"], rel=1e-4)
    assert (params["model.name"], params["calibration.num_images"], params["sparsity.mlp"]) == (
        "vit_digits",
        "64",
        "null",
    )
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "error_qk/before")
    errors = [block["reconstruction_error"]["qk"]["before"] for block in report["blocks"]]
    assert [one.value for one in sorted(history, key=lambda one: one.step)] == pytest.approx(errors, rel=1e-4)


def test_wandb(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    tracked("wandb", capsys)
    (log,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    for name in ("pruned/top1", "images_per_second/pruned", "error_mlp/after", "calibration.num_images"):
        assert name.encode() in log.read_bytes(), name


def test_tracker_that_fails_is_told_and_the_result_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(figures: track.Figures, folder: Path) -> None:
        raise ConnectionError("no route to host.\nMore of it")

    seen: list[track.Figures] = []
    monkeypatch.setattr("corp_cli.pipeline.require_trackers", lambda names: None)
    monkeypatch.setitem(track.TRACKS, "wandb", unreachable)
    monkeypatch.setitem(track.TRACKS, "mlflow", lambda figures, folder: seen.append(figures))
    assert main(["prune", *UNTIMED, "track=[wandb,mlflow]", "hydra.run.dir=run"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warning.startswith("corp: warning: track=wandb failed")
    assert warning.endswith("no route to host.")
    assert Path("run/pruned.safetensors").is_file()
    (figures,) = seen  # the other one is told all the same
    assert figures.name.endswith("/run")
    assert figures.settings["compensation.ridge_lambda"] == "null"


@pytest.mark.parametrize("left", [None, "wandb/offline-run-1"])
def test_tracker_that_is_not_installed_is_refused_before_any_work(
    left: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a folder of its name would be imported as a package without code."""
    if left is not None:
        Path(left).mkdir(parents=True)
    monkeypatch.setattr(track, "find_spec", lambda name: PathFinder.find_spec(name, ["."]))
    assert main(["prune", *UNTIMED, "track=wandb", "hydra.run.dir=run"]) == 2
    one_sentence(capsys, ["track=wandb", "pip install wandb"])
    assert not Path("run").exists()


@pytest.mark.parametrize("value", ["comet", "[wandb,comet]", "[]", "[wandb,wandb]", "true"])
def test_what_is_no_tracker(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", f"track={value}"]) == 2
    one_sentence(capsys, ["track="])
