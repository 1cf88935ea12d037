"""prune(cfg) on the bundled model: what it returns, what it writes, and that settings reach the stages."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from corp_cli import pipeline
from corp_cli.commands.prune import run
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import CompensationConfig, ModelConfig, PruneConfig, RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.export import write
from corp_cli.files.checkpoint import load_pruned
from corp_cli.files.manifest import read_manifest
from corp_cli.models.loaded import dense_model, weights_sha256
from corp_cli.models.loading import load_dense
from corp_cli.pipeline import PruneResult, prune
from corp_cli.prepare.work import Work, settled
from corp_cli.report.schema import SCHEMA_VERSION, Removed
from corp_cli.report.summary import summary_html
from tests.support.figures import known
from tests.support.recipes import PAPER, PAPER_COMPENSATION
from tests.support.variants import logits, require_same


def config(**parts: object) -> PruneConfig:
    """The paper's recipe on few images, with `parts` put in."""
    quick = PruneConfig(
        **PAPER,
        calibration=CalibrationConfig(num_images=256),
        evaluation=EvaluationConfig(num_images=200, throughput_batches=0),
        device="cpu",
    )
    return replace(quick, **parts)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[PruneResult, Path]:
    folder = tmp_path_factory.mktemp("half")
    return prune(config(), folder), folder


def test_default_run_keeps_the_digits(half: tuple[PruneResult, Path]) -> None:
    """Held-out digits: the dense model is right, and compensation brings back most of what cutting half costs."""
    evaluation = half[0].report.evaluation
    assert evaluation.held_out
    assert known(evaluation.dense.top1) >= 97
    assert known(evaluation.pruned.kl) < 0.5 * known(evaluation.uncompensated.kl)
    assert known(evaluation.pruned.agreement) > known(evaluation.uncompensated.agreement)


def test_a_result_is_short_to_read(half: tuple[PruneResult, Path]) -> None:
    """One line, and for a notebook the table that the command prints, nothing in it that HTML would take for a tag."""
    result = half[0]
    assert len(repr(result).splitlines()) == 1
    sizes = "vit_digits: parameters 674.41 k → 396.20 k (-41.3%), MACs 11.620 M → 6.837 M (-41.2%)"
    found = result.report.evaluation
    fidelity = f"top-1 {found.dense.top1:.1f}% → {found.pruned.top1:.1f}%, KL to dense {known(found.pruned.kl):.3g}"
    assert repr(result) == f"<PruneResult of {sizes}, {fidelity}>"
    assert repr(result.report) == "<Report of vit_digits: -41.3% parameters, -41.2% MACs>"
    table = ElementTree.fromstring(f"<div>{result._repr_html_()}</div>")
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[0] == ["", "dense", "pruned", "change"]
    assert rows[1] == ["parameters", "674.41 k", "396.20 k", "-41.3%"]
    assert rows[2] == ["MACs", "11.620 M", "6.837 M", "-41.2%"]
    assert {row[0] for row in rows[3:]} == {"top-1", "top-5", "agreement", "KL to dense"}
    named = replace(result.report, model=replace(result.report.model, name="<b>&"))
    assert "".join(ElementTree.fromstring(f"<div>{summary_html(named)}</div>").itertext()).startswith("<b>&, paper")


def test_files_are_whole_and_nothing_else_is_left(half: tuple[PruneResult, Path]) -> None:
    result, folder = half
    assert sorted(p.name for p in folder.iterdir()) == ["plan.yaml", "pruned.safetensors", "report.html", "report.json"]
    report = json.loads((folder / "report.json").read_text())
    assert report["schema_version"] == SCHEMA_VERSION
    assert report["size"]["pruned"]["parameters"] == sum(p.numel() for p in result.model.parameters())
    assert report["size"]["pruned"]["flops"] == 2 * report["size"]["pruned"]["macs"]
    assert report["sparsity"]["achieved"] == {"mlp": 0.5, "qk": 0.5, "vo": 0.0, "heads": 0.0}
    assert [block["pruned"] for block in report["blocks"]] == [{"mlp": 192, "qk": 16, "vo": 32, "heads": 3}] * 6
    for block in report["blocks"]:
        assert block["reconstruction_error"]["mlp"]["after"] < block["reconstruction_error"]["mlp"]["before"]
        assert block["reconstruction_error"]["qk"]["after"] <= block["reconstruction_error"]["qk"]["before"]
    assert list(report["stage_seconds"]) == ["load", "calibrate", "rank", "plan", "compensate", "evaluate", "export"]


def test_checkpoint_comes_back(half: tuple[PruneResult, Path]) -> None:
    result, folder = half
    reloaded, x = load_pruned(folder / "pruned.safetensors"), torch.randn(4, 1, 8, 8)
    assert not reloaded.training
    written = result.model.state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in reloaded.state_dict().items())
    require_same(logits(reloaded, x), logits(result.model, x))
    dense, _ = load_dense(ModelConfig())
    assert read_manifest(folder / "pruned.safetensors").dense_sha256 == weights_sha256(dense)


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_hashed_is_the_model_whether_before_it_is_judged_or_after(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, "copies_ahead", ahead)  # as on a GPU
    monkeypatch.setattr(write, "on_host", copy.deepcopy)
    result = prune(config(), tmp_path)
    assert read_manifest(tmp_path / "pruned.safetensors").pruned_sha256 == weights_sha256(result.model)


def test_same_seed_gives_the_same_bits(half: tuple[PruneResult, Path]) -> None:
    again = prune(config()).model.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in half[0].model.state_dict().items())


def test_batch_size_does_not_change_the_result(half: tuple[PruneResult, Path]) -> None:
    other = prune(config(calibration=CalibrationConfig(num_images=256, batch_size=7))).report
    found, expected = other.evaluation.pruned, half[0].report.evaluation.pruned
    assert (found.agreement, found.top1) == (expected.agreement, expected.top1)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3)


def test_compensations_differ_as_they_should() -> None:
    """Affine beats the mean on outputs; the mean cannot do worse than dropping on what it reconstructs."""
    sparsity = SparsityConfig(mlp=0.5, vo=0.5)
    by_mean = replace(PAPER_COMPENSATION, mlp="mean", qk="none", vo="mean")
    kinds = {"affine": PAPER_COMPENSATION, "mean": by_mean}
    reports = {name: prune(config(compensation=c, sparsity=sparsity)).report for name, c in kinds.items()}
    closer, further = (known(reports[name].evaluation.pruned.kl) for name in ("affine", "mean"))
    assert closer < 0.5 * further
    for affine, mean in zip(reports["affine"].blocks, reports["mean"].blocks, strict=True):
        for group in ("mlp", "vo"):
            of_affine, of_mean = affine.reconstruction_error[group], mean.reconstruction_error[group]
            assert of_affine.before == of_mean.before
            assert of_affine.after < of_mean.after < of_mean.before


def test_best_is_much_closer_to_the_dense_model_than_paper(half: tuple[PruneResult, Path]) -> None:
    """Even on half as many images."""
    fewer = config(calibration=CalibrationConfig(num_images=128))
    cfg = replace(fewer, sparsity=SparsityConfig(joint=0.5), recipe="best")
    best = prune(replace(cfg, ranker=RankerConfig(), compensation=CompensationConfig())).report
    paper = half[0].report
    assert best.size.pruned == paper.size.pruned
    assert known(best.evaluation.pruned.kl) < 0.5 * known(paper.evaluation.pruned.kl)


@pytest.mark.parametrize(("recipe", "taken"), [("best", {"macs": 0.4}), ("paper", {"joint": 0.5})])
def test_where_nothing_is_named_a_budget_is_taken(
    recipe: str, taken: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    dense = dense_model(ModelConfig())
    found, _ = settled(replace(config(), recipe=recipe), dense)
    assert found == SparsityConfig(**taken)  # type: ignore[arg-type]
    key, value = next(iter(taken.items()))
    assert f"taking sparsity.{key}={value}" in capsys.readouterr().err
    for named in ({"vo": 0.5}, {"heads": 0.0}, {"params": 0.1}):
        asked = SparsityConfig(**named)  # type: ignore[arg-type]
        assert settled(replace(config(), recipe=recipe, sparsity=asked), dense)[0] is asked
    assert not capsys.readouterr().err


def test_a_budget_is_not_taken_where_blocks_cannot_be_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp_cli.prepare.work.cannot_walk", lambda model: "it is odd")
    assert settled(replace(config(), recipe="best"), dense_model(ModelConfig()))[0] == SparsityConfig(joint=0.5)


def test_nothing_removed_is_the_dense_model() -> None:
    result = prune(config(sparsity=SparsityConfig(joint=0.0)))
    assert result.report.evaluation.pruned.kl == 0
    assert result.report.size.removed_percent == Removed(parameters=0, macs=0)


def test_without_labels_fidelity_is_measured_on_images_left_over(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(60):
        Image.new("L", (8, 8), i).save(tmp_path / f"{i}.png")
    cfg = config(calibration=CalibrationConfig(path=str(tmp_path), num_images=40, num_workers=0))
    report = prune(cfg).report
    assert (report.calibration.images, report.evaluation.images) == (40, 20)
    assert report.evaluation.held_out
    assert report.evaluation.pruned.top1 is None
    report = prune(replace(cfg, evaluation=replace(cfg.evaluation, path=str(tmp_path), num_images=None))).report
    assert not report.evaluation.held_out


def test_a_model_without_bundled_images_asks_for_a_folder() -> None:
    with pytest.raises(CorpError, match=r"set calibration\.path"):
        prune(config(model=ModelConfig("deit_tiny_patch16_224", pretrained=False)))


def test_the_run_says_where_everything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(replace(config(), evaluation=EvaluationConfig(num_images=50, throughput_batches=1)), tmp_path)
    out = capsys.readouterr().out
    assert "top-1" in out
    assert "images/s" in out
    assert f"Wrote pruned.safetensors, report.json, report.html and plan.yaml to {tmp_path}" in out
    assert "50 images of digits_test.safetensors" in out


@pytest.mark.usefixtures("tiny_digits")
def test_along_the_stream_nothing_of_the_dense_model_is_measured_where_sizes_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "measure_statistics", None)
    monkeypatch.setattr(pipeline, "rank", None)
    best = {"recipe": "best", "ranker": RankerConfig(), "compensation": CompensationConfig()}
    found = prune(config(**best, sparsity=SparsityConfig(joint=0.5))).report.evaluation
    assert known(found.pruned.kl) < known(found.uncompensated.kl)
