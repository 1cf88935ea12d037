"""`objective=`: what a run returns to a sweeper of Hydra, and what is refused before it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, ListConfig

from corp_cli.cli import plugins
from corp_cli.cli.handover import Runner
from corp_cli.cli.main import main
from tests.support.typed import QUICK, UNTIMED, one_sentence

pytestmark = pytest.mark.usefixtures("tiny_digits", "empty_folder")


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What jobs return to Hydra, which hands it to its sweeper."""
    values: list[Any] = []
    call = Runner.__call__

    def watched(runner: Runner, cfg: DictConfig) -> Any:
        values.append(call(runner, cfg))
        return values[-1]

    monkeypatch.setattr(Runner, "__call__", watched)
    return values


def report(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())
    return content


@pytest.mark.slow
def test_every_objective_is_its_figure_of_the_report(returned: list[Any]) -> None:
    names = ["top1", "kl", "parameters", "[macs,agreement]", "latency", "null"]
    argv = [*QUICK, "evaluation.throughput_batches=1", "compensation=mean", f"objective={','.join(names)}"]
    assert main(["prune", "-m", *argv, "hydra.sweep.dir=sweep"]) == 0
    top1, kl, parameters, two, latency, nothing = returned
    found = [report(f"sweep/{number}") for number in range(6)]
    judged, size = found[0]["evaluation"]["pruned"], found[0]["size"]["pruned"]
    assert top1 == pytest.approx(judged["top1"])
    assert kl == pytest.approx(judged["kl"], rel=1e-4)
    assert parameters == size["parameters"]
    assert two == (size["macs"], pytest.approx(judged["agreement"]))
    assert latency == pytest.approx(1000 / found[4]["throughput"]["images_per_second"]["pruned"], rel=1e-4)
    assert nothing is None


def test_job_that_fails_or_breaks_a_limit_returns_nothing(returned: list[Any]) -> None:
    argv = [*UNTIMED, "objective=macs", "gate.max_kl=0,100", "calibration.path=null,nowhere"]
    assert main(["prune", "-m", *argv, "hydra.sweep.dir=sweep"]) == 2
    assert [value is None for value in returned] == [True, True, False, True]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["objective=flops"], ["objective=flops", "top1, agreement, kl, macs, parameters, latency"]),
        (["objective=[macs,kl,top1]"], ["at most 2"]),
        (["objective=[kl,kl]"], ["each once"]),
        (["objective=[]"], ["objective=[]"]),
        (["objective=[macs,latency]", "evaluation.throughput_batches=0"], ["evaluation.throughput_batches=0"]),
    ],
)
def test_what_is_no_objective(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", *argv]) == 2
    one_sentence(capsys, words)


def test_top1_without_labels_is_refused_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    np.save("pixels.npy", np.zeros((80, 8, 8), np.uint8))
    assert main(["prune", *UNTIMED, "calibration.path=pixels.npy", "objective=[macs,top1]", "hydra.run.dir=run"]) == 2
    err = capsys.readouterr().err
    assert "objective=top1 needs labels" in err
    assert not Path("run").exists()


def optuna() -> list[str]:
    """A multirun by optuna's sweeper; where it is not installed, by the basic one under its name."""
    if find_spec("hydra_plugins") is not None and find_spec("hydra_plugins.hydra_optuna_sweeper") is not None:
        return ["prune", "-m", "hydra/sweeper=optuna"]
    path = Path("conf/hydra/sweeper/optuna.yaml")
    path.parent.mkdir(parents=True)
    basic = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    path.write_text(yaml.safe_dump({"_target_": basic, "direction": "minimize"}))
    return ["prune", "-m", "--config-dir", "conf", "hydra/sweeper=optuna"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["goes by a number", "set objective"]),
        (["objective=kl", "--dry-run"], ["leave out --dry-run"]),
        (["objective=top1"], ["objective=top1 wants hydra.sweeper.direction=maximize"]),
        (["objective=[macs,top1]"], ["objective=[macs,top1]", "direction=[minimize,maximize]", "it is minimize"]),
        (["objective=[macs,kl]", "hydra.sweeper.direction=[minimize,maximize]"], ["direction=[minimize,minimize]"]),
    ],
)
def test_optuna_is_asked_for_what_it_can_do(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*optuna(), *argv]) == 2
    one_sentence(capsys, words)


def test_directions() -> None:
    plugins.require_directions(["kl"], "minimize")
    plugins.require_directions(["macs", "agreement"], ListConfig(["minimize", "maximize"]))


@pytest.mark.filterwarnings("default")  # optuna 2 is older than what it uses
def test_pareto_front_of_optuna(capfd: pytest.CaptureFixture[str]) -> None:
    """The example of docs/sweeps.md, made small: optuna's own file names runs that no other run beats in both."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install hydra-optuna-sweeper optuna")
    argv = [*UNTIMED, "compensation.mlp=affine", "compensation.vo=lowrank", "sparsity.curve_images=16"]
    argv += ["objective=[macs,kl]", "hydra.sweeper.direction=[minimize,minimize]", "hydra.sweeper.n_trials=3"]
    space = ["sparsity.macs=interval(0.2,0.6)", "compensation.alpha=interval(0,1)"]
    assert main(["prune", "-m", "hydra/sweeper=optuna", *argv, *space, "hydra.sweep.dir=sweep"]) == 0
    front = yaml.safe_load(Path("sweep/optimization_results.yaml").read_text())["solutions"]
    found = [report(f"sweep/{number}") for number in range(3)]
    points = [(one["size"]["pruned"]["macs"], one["evaluation"]["pruned"]["kl"]) for one in found]
    best = {a for a in points if not any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)}
    assert {round(one["values"][0]) for one in front} == {macs for macs, _ in best}
    assert {"sparsity.macs", "compensation.alpha"} == set(front[0]["params"])
