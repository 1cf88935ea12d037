"""`corp prune --dry-run`: what it says is what a run would do, and nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from corp_cli import load_config
from corp_cli.cli.main import main
from corp_cli.commands import dry_run, estimate, probes
from corp_cli.commands import prune as command
from corp_cli.commands.dry_run import foresee
from corp_cli.commands.estimate import expected_seconds
from corp_cli.commands.probes import Rates
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.cache import Cache
from corp_cli.measure.timing import ENOUGH, pass_seconds
from corp_cli.method.fit_mlp import ROUNDS
from corp_cli.pipeline import prune
from corp_cli.prepare.work import prepare

QUICK = [
    "device=cpu",
    "calibration.num_images=64",
    "calibration.num_workers=0",
    "evaluation.num_images=32",
    "evaluation.num_workers=0",
    "evaluation.throughput_batches=0",
]
RATES = Rates(forward=1.0, judged=1.0, calibrate=2.0, read=0.0, tokens=17, width=96, batch=32, host_mib=500.0)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORP_DEBUG", raising=False)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rates], None]:
    """Let a forward pass take what the test says, and solves no time."""

    def set_to(rates: Rates) -> None:
        monkeypatch.setattr(dry_run, "measure_rates", lambda *args: rates)
        monkeypatch.setattr(estimate, "measure_solves", lambda *args: probes.Solves())

    set_to(RATES)
    return set_to


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize("overrides", [["sparsity.joint=0.5"], ["sparsity.heads=0.34", "sparsity.vo=0.25"]])
def test_sizes_and_counts_are_those_of_the_run(overrides: list[str]) -> None:
    cfg = load_config(*QUICK, *overrides)
    outlook, report = foresee(cfg), prune(cfg, expect=expected_seconds).report
    assert list(outlook.sizes) == [block.pruned for block in report.blocks]
    for key, label in (("parameters", "parameters"), ("macs", "MACs")):
        assert outlook.counts[label] == (getattr(report.size.dense, key), getattr(report.size.pruned, key))
    assert outlook.seconds.keys() <= report.stage_seconds.keys()
    assert all(value >= 0 and math.isfinite(value) for value in outlook.seconds.values())
    assert (outlook.peak_mib["host"] or 0) > outlook.rates.host_mib


@pytest.mark.usefixtures("rates", "tiny_digits")
@pytest.mark.parametrize(("key", "label"), [("macs", "MACs"), ("params", "parameters")])
def test_a_budget_and_uniform_sizes_that_would_meet_it(
    key: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outlook = foresee(load_config(*QUICK, f"sparsity.{key}=0.4"))
    before, after = outlook.counts[label]
    assert 0.5 * before < after <= 0.6 * before
    assert len(set(outlook.sizes)) == 1
    assert main(["prune", "--dry-run", *QUICK, f"sparsity.{key}=0.4"]) == 0
    out = capsys.readouterr().out
    assert f"sparsity.{key}=0.4 leaves at most {0.6 * before:,.0f} of {before:,} {label}." in out
    assert "after it has measured damage" in out


@pytest.mark.usefixtures("rates", "tiny_digits")
@pytest.mark.parametrize("propagate", ["sequential", "none"])
def test_the_refit_of_mlps_takes_its_time(propagate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "seconds", lambda work, device: work() and 1.0)

    def added(*words: str) -> float:
        argv = [*QUICK, *words, f"compensation.propagate={propagate}"]
        without, fitted = (
            foresee(load_config(*argv, f"compensation.mlp={how}")).seconds["compensate"]
            for how in ("affine", "gauss_newton")
        )
        return fitted - without

    assert (
        added("sparsity.joint=0.5") >= ROUNDS["sequential"] * 2
    )  # a second for each of two equal MLPs, on all of their tokens
    assert added("sparsity.qk=0.5") == 0


@pytest.mark.usefixtures("rates", "tiny_digits")
def test_the_refit_of_values_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "seconds", lambda work, device: 1.0)

    def needed(vo: str, fraction: float) -> float:
        argv = [*QUICK, f"sparsity.vo={fraction}", f"compensation.vo={vo}", "calibration.num_images=256"]
        return foresee(load_config(*argv, "compensation.fit_tokens=256")).seconds["compensate"]

    # two heads of two blocks, five sweeps of a second each; and 256 tokens, of which a second takes 256
    assert needed("reduced_rank", 0.5) - needed("lowrank", 0.5) == pytest.approx(2 * 2 * 5 + 2 + 256 * 1.0)


@pytest.mark.usefixtures("rates")
def test_sizes_of_a_plan_are_shown_by_block(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.yaml").write_text("blocks: {blocks.0: {mlp: 200}, blocks.5: {qk: 8}}")
    assert main(["prune", "--dry-run", *QUICK, "sparsity.plan=plan.yaml"]) == 0
    out = capsys.readouterr().out
    for words in ("200 of 384", "8 of 32", "blocks.1 to blocks.4", "blocks.5 "):
        assert words in out


@pytest.mark.usefixtures("rates", "tiny_digits")
@pytest.mark.parametrize("flag", ["--dry-run", "dry_run=true"])
def test_nothing_is_written(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", flag, *QUICK, "sparsity.joint=0.5"]) == 0
    assert not list(tmp_path.iterdir())
    out = capsys.readouterr().out
    assert out.startswith("vit_digits, best recipe: a dry run, nothing is written.")
    for words in ("32 of 64", "64 images of digits_train", "32 images of digits_test", "time        estimate: "):
        assert words in out
    assert "memory      estimate: " in out


@pytest.mark.usefixtures("rates", "tiny_digits")
def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    Path("run/.hydra").mkdir(parents=True)
    Path("run/.hydra/config.yaml").write_text("seed: 7\n")
    assert main(["prune", "--dry-run", *QUICK, "hydra.run.dir=run"]) == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["run", ".hydra", "config.yaml"]
    assert Path("run/.hydra/config.yaml").read_text() == "seed: 7\n"


@pytest.mark.usefixtures("rates", "tiny_digits")
def test_a_multirun_prints_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "-m", "--dry-run", *QUICK, "sparsity.joint=0.25,0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("a dry run") == 2
    assert out.index("48 of 64") < out.index("32 of 64")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny_digits")
def test_it_refuses_what_the_run_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "--dry-run", *QUICK, "sparsity.macs=0.99"]) == 2
    assert "cannot be met" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny_digits")
def test_the_run_itself_is_not_begun(monkeypatch: pytest.MonkeyPatch, rates: Callable[[Rates], None]) -> None:
    monkeypatch.setattr(command, "prune", None)
    command.run(load_config(*QUICK, "sparsity.joint=0.5", "dry_run=true"), Path("out"))
    assert not Path("out").exists()
    with pytest.raises(CorpError, match=r"dry_run=true is for the command"):
        prune(PruneConfig(device="cpu", dry_run=True))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_left_in_all_is_estimated_where_somebody_sees_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def pruned(cfg: PruneConfig, folder: Path, cache: Cache, expect: Any) -> None:
        asked.append(expect)
        raise CorpError("enough")

    monkeypatch.setattr(command, "on_terminal", lambda: terminal)
    monkeypatch.setattr(command, "prune", pruned)
    with pytest.raises(CorpError, match="enough"):
        command.run(PruneConfig(device="cpu"), tmp_path / "out")
    assert asked == [expected_seconds if terminal else None]


@pytest.mark.usefixtures("tiny_digits")
def test_nothing_is_expected_where_short_runs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    cfg = load_config(*QUICK)
    work = prepare(cfg)
    monkeypatch.setattr(estimate, "measure_rates", fails)
    assert expected_seconds(work, cfg) == {}


# --- estimates ------------------------------------------------------------------------------------------------


def seconds(*overrides: str) -> dict[str, float]:
    """Without the refit of MLPs: see above."""
    named = [] if any(one.startswith("sparsity.macs") for one in overrides) else ["sparsity.joint=0.5"]
    return foresee(load_config(*QUICK, *named, "compensation.mlp=affine", *overrides)).seconds


def test_seconds_follow_images_stages_and_rates(
    rates: Callable[[Rates], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = seconds()
    at_once = seconds("compensation.propagate=none")
    assert at_once["calibrate"] == pytest.approx(64 * 2.0)
    assert found["calibrate"] == 0
    assert 64 * (1 + 2 + 2) < found["compensate"] < 64 * (1 + 2 + 3)  # both streams whole, x̂ twice through what is cut
    assert 32 * 2 < found["evaluate"] < 32 * 3
    assert found["plan"] == found["rank"] == 0
    more = seconds("calibration.num_images=128", "compensation.propagate=none")
    assert more["calibrate"] == pytest.approx(2 * at_once["calibrate"])
    assert at_once["compensate"] == 0
    rates(Rates(0.0, 0.0, 0.0, 2.0, 17, 96, 32, 500.0))
    monkeypatch.setattr(estimate, "measure_solves", lambda *args: probes.Solves(5.0, 2.0, 3.0))
    found = seconds()
    assert found["calibrate"] == found["rank"] == 0  # of a dense model that nothing is to be known of
    assert found["compensate"] == pytest.approx(64 * 2.0 + 5 + 2 + 3)  # which ranks
    at_once = seconds("compensation.propagate=none")
    assert at_once["calibrate"] == pytest.approx(64 * 2.0)
    assert at_once["rank"] == 5.0
    assert at_once["compensate"] == 2


def test_judging_has_a_rate_of_its_own_and_timing_ends(rates: Callable[[Rates], None]) -> None:
    """In float32, whatever calibration multiplies in; slow models take four turns at most, fast ones ENOUGH."""
    before = seconds()
    rates(replace(RATES, judged=3.0))
    found = seconds()
    assert found["evaluate"] == pytest.approx(3 * before["evaluate"])
    assert all(found[name] == before[name] for name in ("calibrate", "rank", "plan", "compensate"))
    many = seconds("evaluation.throughput_batches=1000")["evaluate"]
    assert many == seconds("evaluation.throughput_batches=3")["evaluate"]
    assert many > seconds("evaluation.throughput_batches=2")["evaluate"] > found["evaluate"]
    rates(replace(RATES, judged=1e-4))
    assert ENOUGH < seconds("evaluation.throughput_batches=1000")["evaluate"] < ENOUGH + 0.1


def test_rates_of_calibration_are_taken_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []
    cfg = load_config(*QUICK)
    work, timed = prepare(cfg), pass_seconds

    @contextmanager
    def entered(precision: str, device: torch.device) -> Iterator[None]:
        inside.append(precision)
        yield
        inside.append("left")

    def passed(*args: Any) -> Any:
        inside.append("passes")
        return timed(*args)

    monkeypatch.setattr(probes, "products", entered)
    monkeypatch.setattr(probes, "pass_seconds", passed)
    probes.measure_rates(work, replace(work.calibration, precision="tf32"))
    assert inside == ["passes", "tf32", "passes", "left", "passes"]


def test_solves_are_extrapolated_to_the_widths_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six MLPs of 384 channels: each as timed at that width; wider ones by how the time grows, a cube at most."""
    asked: list[int] = []

    def timed(work: object, cfg: object, width: int, outputs: int) -> probes.Solves:
        asked.append(width)
        return probes.Solves(width**2.0, width**5.0, 1.0)

    monkeypatch.setattr(probes, "solve_seconds", timed)
    work, cfg = prepare(load_config(*QUICK)), load_config(*QUICK)
    assert probes.measure_solves(work, cfg, 96).rank == pytest.approx(6 * 384**2)
    assert asked == [192, 384]
    monkeypatch.setattr(probes, "SOLVED", 96)
    found = probes.measure_solves(work, cfg, 96)
    assert found.rank == pytest.approx(6 * 384**2)
    assert found.compensate == pytest.approx(6 * 96**5 * 4**3)
    assert found.refit == pytest.approx(6 * 4)


def test_what_this_machine_takes_is_measured() -> None:
    work, cfg = prepare(load_config(*QUICK)), load_config(*QUICK)
    found = vars(probes.solve_seconds(work, cfg, 32, 96)) | vars(probes.measure_rates(work, cfg.calibration))
    assert all(found[name] > 0 for name in ("rank", "compensate", "refit", "forward", "judged", "calibrate", "read"))
    assert (found["tokens"], found["width"]) == (17, 96)


@pytest.mark.usefixtures("rates")
def test_curves_cost_the_blocks_after_each_group() -> None:
    """Five sizes of three groups in six blocks, through 6, 5, … 1 of them, with 20% and with 40% cut around them."""
    asked = "sparsity.macs=0.4", "sparsity.curve_images=16", "sparsity.merge_tokens=false"
    found = seconds(*asked)
    passes = 5 * 3 * sum(range(1, 7)) / 6
    assert 2 * 0.5 * passes < found["plan"] / 16 - 4 < 2 * 0.8 * passes
    thrice = seconds(*asked, "sparsity.rounds=2")  # once more, with what was found cut around
    assert 1.3 * found["plan"] < thrice["plan"] < 1.5 * found["plan"]
    merging = seconds(*asked[:2])  # six counts of tokens in all blocks but the last, and nothing cut around
    assert merging["plan"] / 16 - 2 == pytest.approx(passes + 6 * sum(range(2, 7)) / 6)
    assert seconds(*asked[:2], "compensation.mlp=gauss_newton")["plan"] > merging["plan"]  # refits are tried first


@pytest.mark.usefixtures("rates")
def test_streams_of_sequential_repair_need_memory() -> None:
    many = ["sparsity.joint=0.5", "calibration.num_images=1000", "calibration.batch_size=1"]
    with_streams = foresee(load_config(*QUICK, *many)).peak_mib["host"] or 0
    scratch = foresee(load_config(*QUICK, *many, "calibration.scratch=here")).peak_mib["host"] or 0
    refits = foresee(load_config(*QUICK, *many, "compensation.propagate=none")).peak_mib["host"] or 0
    stream = 1.2 * 1000 * 17 * 96 * 4 / 2**20
    assert with_streams - scratch == pytest.approx(4 * stream)  # dense and pruned, and targets of attention and MLP
    assert with_streams - refits == pytest.approx(stream)


def test_reading_and_computing_share_the_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    images = foresee(load_config(*QUICK)).work.images
    files = type("Files", (), {"items": (Path("a.png"),)})()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rates = Rates(1.0, 1.0, 2.0, 1.0, 17, 96, 32, 500.0)
    assert estimate.feed(1.0, images.calibration, rates, 4, torch.device("cpu")) == 2.0  # tensors need no workers
    assert estimate.feed(1.0, files, rates, 0, torch.device("cpu")) == 2.0
    assert estimate.feed(1.0, files, rates, 2, torch.device("cpu")) == 1.5
    assert estimate.feed(1.0, files, rates, 2, torch.device("cuda")) == 1.0
