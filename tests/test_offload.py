"""Blocks that come to the device one at a time: the same kept units and weights, and nothing of it stays behind.

On a CPU device and host are one. The weights are then kept in bfloat16 and worked on in float32, so that it shows which
blocks are there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from corp_cli import CorpError, load_config, load_pruned, prune, prune_model
from corp_cli.cli.main import main
from corp_cli.commands import evaluate
from corp_cli.config.checkpoints import EvaluateConfig
from corp_cli.config.prune import CompensationConfig, RankerConfig, SparsityConfig
from corp_cli.method import memory, sample, sequential
from corp_cli.method.calibrate import calibrate
from corp_cli.method.compensate import compensate
from corp_cli.method.fit_one_shot import fit_every_block
from corp_cli.method.keep import keep
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.models import offload
from corp_cli.models.adapter import block_names, blocks_of
from corp_cli.models.offload import bring_together, keep_on_host, kept_in, on_host, visit
from corp_cli.models.streams import logits_from, tokens
from corp_cli.models.token_block import put_token_blocks
from corp_cli.runtime import scratch
from tests.support import variants
from tests.support.repair import repaired
from tests.support.typed import UNTIMED
from tests.support.variants import logits, require_same

CPU = torch.device("cpu")
BY_BLOCK = ("calibration.offload=blocks", "device=cpu")
QUIET = ("evaluation.throughput_batches=0", "calibration.batch_size=4")
VARIANTS = pytest.mark.parametrize("variant", ["vit", "dinov3_swiglu", "beit", "swin", "sam"])


def parted(model: nn.Module) -> nn.Module:
    keep_on_host(found := copy.deepcopy(model), CPU)
    return found


def there(model: nn.Module) -> list[str]:
    """The blocks that are on the device."""
    blocks = {name: next(model.get_submodule(name).parameters()).dtype for name in block_names(model)}
    return [name for name, dtype in blocks.items() if dtype == torch.float32]


def test_refits_leave_nothing_on_the_device() -> None:
    """What was refitted is replaced in a copy, whose tensors the model before it still has."""
    model, x = parted(variants.build("deit").bfloat16()), variants.images("deit", 12)
    blocks, groups = blocks_of(model), frozenset({"mlp", "vo"})
    cfg = CompensationConfig(propagate="none", ridge_lambda=0.1)
    statistics = calibrate(model, blocks, [x], groups)
    scores = rank(model, blocks, statistics, groups, RankerConfig(), RankerArgs.seeded(0, 0.1))
    half = [replace(block.sizes, mlp=block.sizes.mlp // 2, vo=block.sizes.vo // 2) for block in blocks]
    kept = tuple(keep(*each) for each in zip(scores, blocks, half, strict=True))
    cut, errors = compensate(model, blocks, statistics, kept, cfg)
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in cut.state_dict().items()}
    fitted, _ = fit_every_block(model, cut, blocks, kept, errors, [x], cfg, 0)
    for name, tensor in cut.state_dict().items():
        assert tensor.dtype == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert there(fitted) == there(cut) == []
    assert not torch.equal(fitted.state_dict()["blocks.0.mlp.fc2.weight"], cut.state_dict()["blocks.0.mlp.fc2.weight"])


def test_a_copy_on_the_host_is_whole_and_one_that_is_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = variants.build("deit")
    model.tied = model.head
    assert on_host(model) is model
    monkeypatch.setattr(offload, "HOST", torch.device("meta"))  # from which the CPU is as far as a GPU is from it
    copied: Any = on_host(model)
    assert copied.tied is copied.head
    assert {tensor.device.type for tensor in copied.state_dict().values()} == {"meta"}
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert [*dict(copied.named_parameters())] == [*dict(model.named_parameters())]
    assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]


# --- one model ------------------------------------------------------------------------------------------------


@VARIANTS
def test_it_runs_as_the_whole_one_does(variant: str) -> None:
    model, x = variants.build(variant).bfloat16(), variants.images(variant)
    by_block = parted(model)
    expected = logits(copy.deepcopy(model).float(), x)
    require_same(logits(by_block, x), expected)
    with torch.inference_mode():
        require_same(logits_from(by_block, tokens(by_block, x), blocks_of(by_block)), expected)
    assert there(by_block) == []


def test_one_block_at_a_time_is_there() -> None:
    model = parted(variants.build("dinov3_swiglu").bfloat16())
    seen: list[list[str]] = []
    for name in block_names(model):
        model.get_submodule(f"{name}.mlp").register_forward_hook(lambda *_: seen.append(there(model)))
    logits(model, variants.images("dinov3_swiglu"))
    assert seen == [["blocks.0"], ["blocks.1"]]
    others = parted(variants.build("dinov3_swiglu").bfloat16())
    for block in visit(blocks_of(model), model, others):
        assert there(model) == there(others) == [block.name]
        logits(model, variants.images("dinov3_swiglu"))
        assert block.name in there(model)  # while it is visited, whoever runs the model
    assert there(model) == there(others) == []


def test_what_changes_meanwhile_comes_back_and_the_rest_is_left_alone() -> None:
    model = parted(variants.build("vit").bfloat16())
    block = model.get_submodule("blocks.0")
    bias, weight = (block.get_parameter(f"mlp.fc1.{name}") for name in ("bias", "weight"))
    before, address = bias.data.clone(), weight.data_ptr()
    for _ in visit(blocks_of(model)[:1], model):
        with torch.no_grad():
            bias.add_(1)
            block.mlp.fc2 = nn.Linear(128, 32)  # type: ignore[union-attr]
    assert weight.data_ptr() == address
    torch.testing.assert_close(bias.data, (before.float() + 1).bfloat16())
    assert block.get_parameter("mlp.fc2.weight").dtype == torch.bfloat16


def test_an_error_leaves_no_block_behind() -> None:
    model = parted(variants.build("vit").bfloat16())
    every = visit(blocks_of(model), model)
    assert there(model) == [] != [next(every).name] == there(model)
    del every  # as the error does that leaves the loop
    assert there(model) == []
    broken = model.get_submodule("blocks.1.mlp").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, variants.images("vit"))
    broken.remove()
    assert there(model) == []


@VARIANTS
def test_together_again_it_is_as_it_was(variant: str) -> None:
    model = variants.build(variant).bfloat16()
    by_block = parted(model)
    logits(by_block, variants.images(variant))
    copied = copy.deepcopy(by_block)
    for one in (by_block, copied):
        assert kept_in(one) == torch.bfloat16
        bring_together(one)
        bring_together(one)
        assert kept_in(one) is None
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
        for name, tensor in model.state_dict().items():
            assert torch.equal(one.state_dict()[name], tensor)


def test_blocks_that_merge_tokens_come_and_go_too() -> None:
    model = variants.build("deit").bfloat16()
    by_block = parted(model)
    put_token_blocks(by_block)
    x = variants.images("deit")
    require_same(logits(by_block, x), logits(model.float(), x))
    assert there(by_block) == []


# --- repair ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dinov3_swiglu", "deit"])
@pytest.mark.parametrize("propagate", ["sequential", "none"])
def test_the_repair_is_the_same(variant: str, propagate: str, tmp_path: Path) -> None:
    model, x = variants.build(variant), variants.images(variant, 12)
    how = CompensationConfig(propagate=propagate)
    sparsity = SparsityConfig(mlp=0.5, vo=0.5, round_to=1)
    plain, errors = repaired(model, x, 4, sparsity, how)
    by_block, others = repaired(
        parted(model), x, 4, sparsity, how, keep=scratch.keeper(str(tmp_path), torch.device("cpu"), False)
    )
    bring_together(by_block)
    assert blocks_of(by_block) == blocks_of(plain)
    for name, tensor in plain.state_dict().items():
        require_same(by_block.state_dict()[name], tensor)
    assert [error["mlp"].after for error in others] == pytest.approx([error["mlp"].after for error in errors])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("propagate", ["sequential", "none"])
def test_a_model_in_bfloat16_stays_in_it(propagate: str, tmp_path: Path) -> None:
    """It is worked on in float32, so that the same units stay as of its float32 copy, with the same weights but for
    what bfloat16 rounds; nothing that needs it whole in float32 is done."""
    given, x = variants.build("dinov3_swiglu").bfloat16(), variants.images("dinov3_swiglu", 16)
    before = copy.deepcopy(given.state_dict())
    asked: dict[str, Any] = {"mlp": 0.5, "overrides": [*QUIET, f"compensation.propagate={propagate}"]}
    plain = prune_model(copy.deepcopy(given), x, **asked)
    asked["overrides"] += BY_BLOCK
    found = prune_model(given, x, output_dir=tmp_path / "out", **asked)
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, before[name])
    written = load_file(tmp_path / "out/pruned.safetensors")
    assert {tensor.dtype for tensor in written.values() if tensor.is_floating_point()} == {torch.bfloat16}
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(written[name], tensor, rtol=2e-2, atol=1e-2 * float(tensor.abs().max()))
        assert torch.equal(found.model.state_dict()[name], written[name])
    assert kept_in(found.model) is None
    assert found.report.throughput is None
    loaded = load_pruned(tmp_path / "out/pruned.safetensors")
    require_same(logits(loaded, x.bfloat16()), logits(found.model, x.bfloat16()))


# --- as the user types it -------------------------------------------------------------------------------------


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that tensors were put into, each with what it holds then."""
    found: list[Path] = []
    on_disk = scratch.on_disk

    def noted(folder: Path, tensor: Tensor) -> Tensor:
        found.append(folder)
        return on_disk(folder, tensor)

    monkeypatch.setattr(scratch, "on_disk", noted)
    return found


@pytest.mark.usefixtures("tiny_digits")
def test_a_budget_and_scratch_from_the_command_line(
    tmp_path: Path, mapped: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted and gone on with, it gives what it gives at once without either."""
    asked = [*UNTIMED, "sparsity.macs=0.4", "sparsity.curve_images=16"]
    plain = [*asked, f"hydra.run.dir={tmp_path}/plain"]
    assert main(["prune", *plain]) == 0
    assert not mapped
    by_block = [*asked, *BY_BLOCK, f"calibration.scratch={tmp_path}/scratch", f"hydra.run.dir={tmp_path}/by_block"]
    with monkeypatch.context() as patch:
        calls: list[int] = []

        def stopped(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return sampled(*args)

        sampled = sample.sampled
        patch.setattr(sequential, "sampled", stopped)
        assert main(["prune", *by_block]) == 130
    assert list((tmp_path / "scratch").iterdir()) == []
    assert main(["prune", f"resume={tmp_path}/by_block"]) == 0
    assert len(mapped) > 10
    assert set(mapped) == {tmp_path / "scratch"}
    assert list((tmp_path / "scratch").iterdir()) == []
    assert "blocks.0 is repaired anew" not in capsys.readouterr().err
    plans = [(tmp_path / name / "plan.yaml").read_text() for name in ("plain", "by_block")]
    assert plans[0] == plans[1]
    images = torch.linspace(-1, 1, 8 * 64).reshape(8, 1, 8, 8)
    paths = (tmp_path / name / "pruned.safetensors" for name in ("plain", "by_block"))
    whole, again = (load_pruned(path)(images).detach() for path in paths)
    torch.testing.assert_close(again, whole, rtol=0, atol=0.01 * float(whole.abs().max()))  # rounding, six refits on


@pytest.mark.usefixtures("empty_folder", "tiny_digits")
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").touch()
    assert main(["prune", *UNTIMED, "calibration.scratch=file"]) == 2
    assert "calibration.scratch=file cannot be written" in capsys.readouterr().err.splitlines()[-1]
    assert main(["prune", *UNTIMED, *BY_BLOCK, "sparsity.latency=0.3"]) == 2
    assert "calibration.offload=blocks keeps it off that" in capsys.readouterr().err.splitlines()[-1]
    assert main(["prune", *UNTIMED, "calibration.offload=some"]) == 2
    assert "calibration.offload=some" in capsys.readouterr().err


@pytest.mark.usefixtures("empty_folder", "tiny_digits")
def test_models_that_do_not_fit_are_judged_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    prune(load_config(*UNTIMED, "recipe=paper", "sparsity.joint=0.5"), "run")
    cfg = EvaluateConfig(checkpoint="run/pruned.safetensors", device="cpu")
    cfg.model.name, cfg.evaluation.num_images = "vit_digits", 32
    for name in ("whole", "by_block"):
        Path(name).mkdir()
    whole = evaluate.evaluate_command(cfg, Path("whole"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    by_block = evaluate.evaluate_command(cfg, Path("by_block"))
    assert (whole.throughput, by_block.throughput) != (None, None)
    assert by_block.throughput is None
    assert by_block.results.model.kl == pytest.approx(whole.results.model.kl, rel=1e-3)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    keep = scratch.keeper(str(tmp_path), torch.device("cpu"), False)
    x = torch.randn(3, 4).bfloat16()
    assert torch.equal(keep(x), x)
    monkeypatch.setattr("mmap.mmap", full)
    with pytest.raises(CorpError, match=r"cannot be written \(No space left on device\); make room"):
        keep(x)
    assert list(tmp_path.iterdir()) == []
