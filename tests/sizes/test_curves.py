"""Damage curves: interpolated between what is measured, shared by budgets, of images that can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from corp_cli import pipeline
from corp_cli.config.images import CalibrationConfig
from corp_cli.config.prune import SparsityConfig
from corp_cli.files.cache.cache import Cache
from corp_cli.models.blocks import Block
from corp_cli.pipeline import prune
from corp_cli.report.schema import Report
from corp_cli.sizes.curves import ANCHORS, UNDONE, Curve, damage_curves, interpolate, refitted, undone
from corp_cli.sizes.plan import averaged
from tests.support.budgets import run


def test_damage_is_interpolated_along_the_error_and_never_falls() -> None:
    errors = torch.tensor([16.0, 9.0, 4.0, 1.0, 0.0])  # by kept size 0..4
    curve = interpolate(errors, [4, 2], [0.1, 0.5])
    torch.testing.assert_close(curve, torch.tensor([1.6, 0.9, 0.4, 0.1, 0.0]).double())
    flat = interpolate(errors, [4, 3, 2], [0.1, 0.5, 0.3])
    assert (flat[:-1] >= flat[1:]).all()
    assert flat[2] == flat[3]


def test_damage_that_later_blocks_undo_counts_less() -> None:
    curves = [Curve(block, "mlp", torch.tensor([1.0, 0.0])) for block in (0, 2, 4)]
    found = [float(curve.damage[0]) for curve in undone(curves, 5)]
    assert found == pytest.approx([1 - UNDONE, 1 - UNDONE / 2, 1.0])
    assert float(undone(curves[:1], 1)[0].damage[0]) == 1.0  # the only block is the last


@pytest.mark.usefixtures("tiny_digits")
def test_only_repair_along_the_stream_undoes_damage(tmp_path: Path) -> None:
    asked = run(SparsityConfig(macs=0.4, curve_images=16, merge_tokens=False))
    first = []
    for propagate in ("none", "sequential"):
        how = replace(asked.compensation, mlp="affine", propagate=propagate)
        report = prune(replace(asked, compensation=how), cache=Cache(tmp_path)).report
        first.append(report.sparsity.curves[0].damage[0])
    assert first[1] == pytest.approx((1 - UNDONE) * first[0], rel=1e-6)


@pytest.mark.usefixtures("tiny_digits")
def test_budgets_share_their_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One set serves all where tokens may be merged, and one more in two contexts where they may not."""
    measured: list[tuple[float, ...]] = []

    def counted(*args: Any) -> list[Curve]:
        measured.append(args[5])
        return damage_curves(*args)

    def spent(fraction: float, merge: bool | None = None, seed: int = 0) -> Report:
        asked = SparsityConfig(macs=fraction, curve_images=16, merge_tokens=merge)
        return prune(replace(run(asked), seed=seed), cache=Cache(tmp_path)).report

    monkeypatch.setattr(pipeline, "damage_curves", counted)
    first, _, again = spent(0.45), spent(0.2), spent(0.45)
    assert measured == [ANCHORS[0.0]]
    assert again.blocks == first.blocks
    assert {(curve.block, curve.group) for curve in again.sparsity.curves} >= {
        (block.name, group) for block in again.blocks for group in ("mlp", "qk", "vo")
    }
    for curve in again.sparsity.curves:
        assert curve.sizes == sorted(curve.sizes)
        assert curve.damage == sorted(curve.damage, reverse=True)
        assert curve.damage[-1] == 0
    for fraction in (0.65, 0.7, 0.2, 0.25):
        spent(fraction, merge=False)
    assert measured[1:] == [ANCHORS[0.2], ANCHORS[0.4]]
    spent(0.2, seed=1)
    assert len(measured) == 4
    for path in tmp_path.glob("curves-*"):
        path.write_text("{")
    spent(0.2)
    assert len(measured) == 5


@pytest.mark.usefixtures("tiny_digits")
def test_a_bad_image_among_those_for_curves_is_left_out(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(tmp_path / f"{i:02}.png")
    (tmp_path / "07.png").write_bytes(b"not an image")
    cfg = run(SparsityConfig(macs=0.3, curve_images=40))
    calibration = CalibrationConfig(path=str(tmp_path), num_images=40, max_bad=0.1, num_workers=0)
    evaluation = replace(cfg.evaluation, max_bad=0.1)  # no image is left over, so the same ones are judged on
    report = prune(replace(cfg, calibration=calibration, evaluation=evaluation)).report
    assert report.calibration.bad.count == 1
    bad = [w for w in report.warnings if "cannot be read" in w and "evaluation" not in w]
    assert len(bad) == 1
    assert "of calibration.path" in bad[0]


def test_damage_is_averaged_over_contexts_and_shrinks_by_what_refits_leave() -> None:
    def curve(block: int, group: str, *damage: float) -> Curve:
        return Curve(block, group, torch.tensor(damage, dtype=torch.float64))

    first = [curve(0, "mlp", 4, 2, 0), curve(0, "qk", 8, 0), curve(1, "mlp", 1, 0)]
    second = [curve(0, "mlp", 2, 2, 0), curve(0, "qk", 4, 0), curve(1, "mlp", 3, 0)]
    found = averaged([first, second])
    assert [c.damage.tolist() for c in found] == [[3, 2, 0], [6, 0], [2, 0]]
    assert [(c.block, c.group) for c in found] == [(0, "mlp"), (0, "qk"), (1, "mlp")]
    assert [c.damage.tolist() for c in refitted(found, (0.5, 0.25))] == [[1.5, 1, 0], [6, 0], [0.5, 0]]
    assert refitted(found, ()) == found


@pytest.mark.usefixtures("tiny_digits")
def test_budgets_go_by_what_refits_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried once for both contexts, and kept with the curves."""
    tried: list[int] = []

    def left(model: nn.Module, blocks: tuple[Block, ...], *rest: Any) -> tuple[float, ...]:
        tried.append(len(blocks))
        return tuple(1e-3 if block is blocks[0] else 1.0 for block in blocks)

    def sizes(how: str) -> list[int]:
        asked = run(SparsityConfig(macs=0.4, curve_images=16, merge_tokens=False))
        cfg = replace(asked, compensation=replace(asked.compensation, mlp=how))
        return [block.pruned.mlp for block in prune(cfg, cache=Cache(tmp_path)).report.blocks]

    as_cut = sizes("affine")
    assert not tried
    monkeypatch.setattr(pipeline, "left_by_refit", left)
    found = sizes("gauss_newton")
    assert tried == [len(found)]
    assert found[0] < as_cut[0]
    assert all(now >= before for now, before in zip(found[1:], as_cut[1:], strict=True))
    assert sizes("gauss_newton") == found
    assert len(tried) == 1
