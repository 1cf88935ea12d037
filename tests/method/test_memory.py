"""What a run holds in memory: the estimate beside tensors that are counted, and what is done where there is less."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from corp_cli.config.images import CalibrationConfig
from corp_cli.config.prune import CompensationConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.linalg import gauss_newton
from corp_cli.method import memory
from corp_cli.method.memory import Load, load_of, needs, place, settle, working_set
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.offload import kept_in
from corp_cli.models.spec import ModelSpec
from corp_cli.runtime import console
from corp_cli.runtime.scratch import on_disk
from tests.support import variants
from tests.support.counted import Counted
from tests.support.repair import repaired

CPU = torch.device("cpu")
BLOCKS = CalibrationConfig(batch_size=2, offload="blocks")
ONE_SHOT = CompensationConfig(propagate="none", token_weights="uniform")


def loaded(model: nn.Module) -> LoadedModel:
    return LoadedModel("", model, ModelSpec("", {}, {"input_size": [3, 64, 64]}))


def model_of(variant: str) -> nn.Module:
    """Wider than others: what follows from widths must outweigh the rest, as it does in models that are large."""
    name, args = variants.arguments(variant)
    return variants.noisy(name, {**args, "embed_dim": 128, "num_heads": 4, "img_size": 64, "depth": 1})


@pytest.mark.parametrize(
    ("variant", "sparsity", "how"),
    [
        ("dinov3_swiglu", SparsityConfig(mlp=0.5), CompensationConfig()),
        ("dinov3_swiglu", SparsityConfig(mlp=0.5), ONE_SHOT),
        ("vit", SparsityConfig(vo=0.5), CompensationConfig()),
    ],
)
def test_the_estimate_is_near_the_tensors_that_are_counted(
    variant: str, sparsity: SparsityConfig, how: CompensationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauss_newton, "CHUNK", 64)
    model, x = model_of(variant), torch.randn(12, 3, 64, 64)
    load = load_of(loaded(model), sparsity.groups(), len(x), sparsity)
    place(loaded(model), BLOCKS, CPU)
    with Counted() as counted:
        repaired(model, x, BLOCKS.batch, sparsity, how, keep=partial(on_disk, tmp_path))
    copies = load.parameters * load.bytes_each * (2 if how.propagate == "none" else 1)  # on the host
    found = working_set(load, how, BLOCKS.batch) + 2 * load.of_block * 4
    assert 0.6 < found / (counted.peak - copies) < 1.5
    assert not list(tmp_path.iterdir())


SEVEN = Load((), frozenset({"mlp"}), 6_716_035_072, 167_813_120, 2, 128, 0.5, 201, 4096, 3 * 224 * 224)


@pytest.fixture
def seven() -> Load:
    """vit_7b_patch16_dinov3 in bfloat16 on 128 images of 224 x 224."""
    block = blocks_of(variants.build("dinov3_swiglu"))[0]
    sizes = type(block.sizes)(8192, 128, 128, 32)
    return Load(**{**vars(SEVEN), "blocks": (type(block)(**{**vars(block), "sizes": sizes}),) * 40})


def test_seven_billion_parameters_need_less_than_12_gb_of_a_device(seven: Load) -> None:
    by_block, whole = (
        memory.most(needs(seven, CompensationConfig(), CalibrationConfig(offload=how))) for how in OFFLOADS
    )
    assert 5e9 < by_block.device < 12e9
    assert 40e9 < by_block.host < 100e9
    assert whole.device > 80e9


OFFLOADS = ("blocks", "none")


def test_more_of_everything_needs_more(seven: Load) -> None:
    how, vo = CompensationConfig(), Load(**{**vars(seven), "groups": frozenset({"vo"})})
    assert working_set(seven, CompensationConfig(fit_tokens=10**6), 32) == working_set(
        seven, how, 32
    )  # of 25 728 tokens
    assert working_set(Load(**{**vars(seven), "images": 1024}), how, 32) > working_set(seven, how, 32)
    assert working_set(seven, how, 256) > working_set(seven, how, 32)
    assert working_set(vo, how, 8) > working_set(vo, CompensationConfig(vo="lowrank"), 8)
    one = needs(seven, how, CalibrationConfig(offload="blocks"))
    assert (
        needs(seven, how, CalibrationConfig(offload="blocks", scratch="there"))["compensate"].host
        < one["compensate"].host
    )


def settled(asked: CalibrationConfig, free: float | None, monkeypatch: pytest.MonkeyPatch) -> CalibrationConfig:
    model = loaded(model_of("dinov3_swiglu"))
    load = load_of(model, frozenset({"mlp"}), 64, SparsityConfig(mlp=0.5))
    need = partial(memory.needs, load, CompensationConfig())
    whole = memory.most(need(CalibrationConfig(batch_size=1, offload="none"))).device
    monkeypatch.setattr(memory, "free_memory", lambda device: None if free is None else free * whole)
    return settle(load, model, CompensationConfig(), asked, CPU)


@pytest.mark.parametrize(
    ("asked", "free", "offload"),
    [
        ("auto", None, "none"),
        ("auto", 10.0, "none"),
        ("auto", 0.9, "blocks"),
        ("none", 0.9, "none"),
        ("blocks", 10.0, "blocks"),
    ],
)
def test_offload_is_settled_by_what_the_device_has(
    asked: str, free: float | None, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settled(CalibrationConfig(offload=asked, batch_size=1), free, monkeypatch)
    assert found == CalibrationConfig(offload=offload, batch_size=1)


@pytest.mark.parametrize(
    ("offload", "free", "waits"),
    [("none", None, False), ("none", 0.9, False), ("none", 1.1, True), ("blocks", 1.1, False)],
)
def test_tokens_wait_on_the_device_where_it_has_room_for_them_too(
    offload: str, free: float | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_of(loaded(model_of("vit")), frozenset({"mlp"}), 64, SparsityConfig(mlp=0.5))
    cfg = CalibrationConfig(batch_size=8, offload=offload)
    need = memory.most(memory.needs(load, CompensationConfig(), replace(cfg, offload="none")))
    assert need.host > 0
    both = None if free is None else free * (need.device + need.host)
    monkeypatch.setattr(memory, "free_memory", lambda device: both)
    assert memory.has_room_for_streams(load, CompensationConfig(), cfg, CPU) is waits


def test_batches_shrink_until_they_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console.collect_warnings()  # so that those of an earlier test do not keep ours back
    assert settled(CalibrationConfig(batch_size=64, offload="none"), 1.0, monkeypatch).batch_size == 16
    assert "calibration.batch_size=64 would not fit the device; going on with 16." in capsys.readouterr().err
    assert settled(CalibrationConfig(batch_size=64, offload="none"), 0.1, monkeypatch).batch_size == 64
    assert "lower compensation.fit_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("offload", "free", "size"), [("none", None, 32), ("none", 1e3, 48), ("none", 1.0, 12), ("blocks", 1e3, 32)]
)
def test_batches_fill_a_device_that_has_room_unless_blocks_come_one_by_one(
    offload: str,
    free: float | None,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = load_of(loaded(model_of("dinov3_swiglu")), frozenset({"mlp"}), 64, SparsityConfig(mlp=0.5))
    monkeypatch.setattr(memory, "BUSY", 50 * load.tokens * load.blocks[0].sizes.mlp * 4)
    assert settled(CalibrationConfig(offload=offload), free, monkeypatch).batch_size == size
    assert "calibration.batch_size" not in capsys.readouterr().err  # nobody asked for another one


def test_batches_that_fill_a_device_have_bounds(seven: Load) -> None:
    assert memory.filling(replace(seven, tokens=10**6)) == 32
    assert memory.filling(replace(seven, tokens=1)) == 256


def test_a_model_that_is_not_walked_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(model_of("vit"))
    other = copy.deepcopy(model.model)
    monkeypatch.setattr(memory, "cannot_walk", lambda model: "nobody knows its blocks")
    load = load_of(model, frozenset({"mlp"}), 8, SparsityConfig(mlp=0.5))
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    assert settle(load, model, CompensationConfig(), CalibrationConfig(), CPU).offload == "none"
    with pytest.raises(CorpError, match=r"calibration\.offload=blocks walks from block to block, and nobody knows"):
        settle(load, model, CompensationConfig(), BLOCKS, CPU)
    assert kept_in(other) is None
