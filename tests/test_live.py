"""prune_model on modules and images in memory: the same work as the command, and a module as the given one was."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from corp_cli import CorpError, PruneResult, load_config, load_pruned, prune, prune_model, save_pruned
from corp_cli.config.prune import ModelConfig
from corp_cli.models.bundled import BundledModel
from corp_cli.models.loading import load_dense
from tests.support.variants import SMALL, arguments, build, images, logits, require_same

QUICK = ("evaluation.throughput_batches=0", "compensation.fit_tokens=256", "sparsity.skip_unsupported=true")


def quickly(model: nn.Module, given: Any, *overrides: str, **how: Any) -> PruneResult:
    """The paper's recipe, which is quick, unless another is asked for."""
    if not how.keys() & {"joint", "mlp", "macs"} and not any(o.startswith("sparsity") for o in overrides):
        how["joint"] = 0.5
    return prune_model(model, given, **{"recipe": "paper", **how}, overrides=(*QUICK, *overrides))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_weights(one: nn.Module, other: dict[str, Tensor]) -> bool:
    ours = one.state_dict()
    return ours.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("name", ["vit", "siglip_attention_pool", "eva02_separate_qkv_sub_norm", "beit", "swin"])
def test_models_of_several_families(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned as the given one is set up, which stays as it is; trainable; and the same again from a file."""
    monkeypatch.chdir(tmp_path)
    model = build(name).train()
    model.get_parameter("patch_embed.proj.weight").requires_grad_(False)
    before, x = weights(model), images(name, 24)
    result = quickly(model, x, mlp=0.5, vo=0.5)
    assert not list(tmp_path.iterdir())
    assert model.training
    assert same_weights(model, before)
    pruned = result.model
    assert pruned.training
    assert type(pruned) is type(model)
    assert result.report.size.removed_percent.parameters > 3
    assert sum(p.numel() for p in pruned.parameters()) == result.report.size.pruned.parameters
    frozen = {n for n, p in pruned.named_parameters() if not p.requires_grad}
    assert frozen == {"patch_embed.proj.weight"}
    optimiser = torch.optim.SGD([p for p in pruned.parameters() if p.requires_grad], lr=0.1)
    found = weights(pruned)
    F.cross_entropy(pruned(x[:4]), torch.arange(4)).backward()
    assert all(p.grad is not None for p in pruned.parameters() if p.requires_grad)
    optimiser.step()
    assert not same_weights(pruned, found)
    save_pruned(pruned, tmp_path / "pruned.safetensors")
    require_same(logits(load_pruned(tmp_path / "pruned.safetensors"), x), logits(pruned.eval(), x))


def test_every_form_of_images_gives_the_same_model() -> None:
    model, x = build("vit"), images("vit", 24)
    labels = torch.arange(24) % 7
    forms: list[Any] = [
        x,
        DataLoader(TensorDataset(x, labels), batch_size=5),
        iter(x.split(7)),
        [(x[:20], labels[:20]), (x[20:], labels[20:])],
    ]
    found = [quickly(model, form) for form in forms]
    for other in found[1:]:
        assert same_weights(other.model, weights(found[0].model))
    assert [f.report.evaluation.labelled_images for f in found] == [0, 24, 0, 24]
    assert [f.report.calibration.source for f in found[:2]] == [
        "the Tensor given as images",
        "the DataLoader given as images",
    ]


def test_images_in_a_folder_are_prepared_as_the_model_says(tmp_path: Path) -> None:
    """Grey pictures of one colour each, so that resizing leaves them: as tensors they are (v / 255 - mean) / std."""
    model: Any = build("vit")
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    folder = tmp_path / "photos = of a b"
    folder.mkdir()
    for i in range(20):
        Image.new("RGB", (40, 40), (10 * i, 5 * i, 200)).save(folder / f"{i:02}.png")
    values = torch.tensor([[10.0 * i, 5.0 * i, 200.0] for i in range(20)])[:, :, None, None]
    held = quickly(model, ((values / 255 - mean) / std).expand(-1, -1, 32, 32).contiguous())
    read = quickly(model, folder)
    assert read.report.calibration.source == folder.name
    assert held.report.blocks[0].pruned == read.report.blocks[0].pruned
    x = images("vit")
    require_same(logits(read.model, x), logits(held.model, x))
    own = tmp_path / "val"
    own.mkdir()
    Image.new("RGB", (40, 40)).save(own / "1.png")
    assert quickly(model, folder, evaluation=str(own)).report.evaluation.images == 1


def digits(path: Path) -> tuple[Tensor, Tensor]:
    held = load_file(path)
    return (held["images"].reshape(-1, 1, 8, 8).float() / 255 - 0.5) / 0.5, held["labels"].long()


def test_it_does_what_the_command_does(tiny_digits: BundledModel) -> None:
    """The bundled digits by name and as module and tensors: the same sizes, weights and figures."""
    settings = ("calibration.num_images=64", *QUICK)
    asked = prune(load_config("recipe=best", "sparsity.macs=0.3", "device=cpu", *settings))
    model, _ = load_dense(ModelConfig())
    loader = DataLoader(TensorDataset(*digits(tiny_digits.evaluation)), batch_size=64)
    found = prune_model(model, digits(tiny_digits.calibration)[0], macs=0.3, evaluation=loader, overrides=settings)
    assert [block.pruned for block in found.report.blocks] == [block.pruned for block in asked.report.blocks]
    assert found.report.size == asked.report.size
    assert found.report.sparsity.merged_tokens == asked.report.sparsity.merged_tokens
    assert found.report.evaluation.pruned.top1 == pytest.approx(asked.report.evaluation.pruned.top1, abs=0.5)
    assert found.report.evaluation.held_out
    x = digits(tiny_digits.evaluation)[0]
    require_same(logits(found.model, x), logits(asked.model, x))


def test_judged_on_images_left_over_or_on_the_same() -> None:
    model, x = build("vit"), images("vit", 40)
    report = quickly(model, x, "calibration.num_images=24").report
    assert (report.calibration.images, report.evaluation.images, report.evaluation.held_out) == (24, 16, True)
    report = quickly(model, x).report
    assert (report.calibration.images, report.evaluation.images, report.evaluation.held_out) == (40, 40, False)
    assert not quickly(model, x, evaluation=x).report.evaluation.held_out
    report = quickly(model, x[:30], evaluation=x[30:]).report
    assert (report.evaluation.images, report.evaluation.held_out) == (10, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = build("vit").to(dtype), images("vit", 24)
    pruned = quickly(model, x.to(dtype)).model
    assert {p.dtype for p in pruned.parameters()} == {dtype}
    assert not pruned.training
    save_pruned(pruned, tmp_path / "pruned.safetensors")
    loaded = load_pruned(tmp_path / "pruned.safetensors")
    assert next(loaded.parameters()).dtype == dtype
    require_same(logits(loaded, x.to(dtype)), logits(pruned, x.to(dtype)))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CORP_TEST_CUDA=1 pytest tests/test_live.py -k cuda"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{"recipe": "paper"}, {"recipe": "best", "macs": 0.3}], ids=["paper", "best"])
def test_on_cuda_device_and_dtype_are_kept_and_the_model_trains(
    dtype: torch.dtype, how: dict[str, Any], tmp_path: Path
) -> None:
    model, x = build("vit").to("cuda", dtype).train(), images("vit", 24)  # the images come from the CPU
    before = weights(model)
    result = quickly(model, x, **how)
    pruned, there = result.model, x.to("cuda", dtype)
    assert same_weights(model, before)
    assert {(p.device.type, p.dtype) for p in pruned.parameters()} == {("cuda", dtype)}
    assert {b.device.type for b in pruned.buffers()} <= {"cuda"}
    assert pruned.training
    assert result.report.environment.device.startswith("cuda")
    assert result.report.size.removed_percent.macs > 5
    optimiser = torch.optim.SGD(pruned.parameters(), lr=0.01)
    labels, losses = torch.arange(4, device="cuda"), []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.cross_entropy(pruned(there[:4]).float(), labels)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pruned.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    save_pruned(pruned, tmp_path / "pruned.safetensors")
    loaded = load_pruned(tmp_path / "pruned.safetensors")
    assert {(p.device.type, p.dtype) for p in loaded.parameters()} == {("cpu", dtype)}
    assert same_weights(loaded, weights(pruned.cpu()))


def test_parameters_are_ordinary_in_any_mode_of_the_caller() -> None:
    model = build("vit")
    with torch.inference_mode():
        pruned = quickly(model, images("vit", 24)).model
    pruned(images("vit")).sum().backward()


def test_a_frozen_model_stays_frozen() -> None:
    model = build("eva02_separate_qkv_sub_norm").requires_grad_(False)
    pruned = quickly(model, images("vit", 24), vo=0.5, mlp=0.0).model
    assert pruned.state_dict().keys() != model.state_dict().keys()
    assert not any(p.requires_grad for p in pruned.parameters())


def test_projections_that_are_joined_learn_if_they_did() -> None:
    model = build("eva02_separate_qkv_sub_norm").requires_grad_(False)
    model.get_parameter("blocks.0.attn.k_proj.weight").requires_grad_(True)
    pruned = quickly(model, images("vit", 24), "sparsity.vo=0.5").model
    learns = {name for name, p in pruned.named_parameters() if p.requires_grad}
    assert learns == {"blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"}


def test_without_a_sparsity_40_percent_of_the_macs_go(tiny_digits: BundledModel) -> None:
    model, x = load_dense(ModelConfig())[0], digits(tiny_digits.calibration)[0][:64]
    report = prune_model(model, x, overrides=QUICK).report
    assert report.config["sparsity"]["macs"] == 0.4
    assert report.config["recipe"] == "best"
    assert report.size.removed_percent.macs >= 40


def test_without_a_sparsity_half_goes_where_a_model_allows_no_budget() -> None:
    name, args = arguments("swin")
    model = timm.create_model(name, **args, strict_img_size=False)
    settings = ("+model.args.strict_img_size=false", "recipe=paper", *QUICK)
    report = prune_model(model, images("swin", 24), overrides=settings).report
    assert report.config["sparsity"]["macs"] is None
    assert report.sparsity.achieved["mlp"] == 0.5


def test_overrides_reach_the_run() -> None:
    settings = ("compensation.mlp=mean", "ranker.mlp=magnitude")
    found = quickly(build("vit"), images("vit", 24), *settings, seed=3).report
    assert found.config["compensation"]["mlp"] == "mean"
    assert found.config["ranker"]["mlp"] == "magnitude"
    assert found.seed == 3
    one = prune_model(build("vit"), images("vit", 24), joint=0.5, recipe="paper", overrides="compensation.mlp=none")
    assert one.report.config["compensation"]["mlp"] == "none"


def test_files_are_written_where_that_is_asked_for(tmp_path: Path) -> None:
    result = quickly(build("vit"), images("vit", 24), output_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "plan.yaml",
        "pruned.safetensors",
        "report.html",
        "report.json",
    ]
    assert same_weights(load_pruned(tmp_path / "pruned.safetensors"), weights(result.model))
    again = quickly(build("vit"), images("vit", 24), f"sparsity.plan='{tmp_path}/plan.yaml'")
    assert again.report.blocks[1].pruned == result.report.blocks[1].pruned


def test_models_with_other_channels_take_tensors() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, in_chans=5)
    result = quickly(model, torch.randn(24, 5, 32, 32))
    assert result.model(torch.randn(2, 5, 32, 32)).shape == (2, 7)


def test_wrapped_models_are_pruned_without_their_wrapper() -> None:
    model, x = build("vit"), images("vit", 24)
    assert same_weights(quickly(nn.DataParallel(model), x).model, weights(quickly(model, x).model))


def test_images_without_a_classifier_are_compared_by_features() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": 0})
    result = quickly(model, [(images("vit", 24), torch.arange(24))])
    assert "cosine to dense" in repr(result)
    assert "KL" not in repr(result)


X = images("vit", 24)


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "Sequential has no `blocks`"),
        (lambda: "deit_tiny", {}, "model is a str"),
        (lambda: build("vit"), {"images": []}, "images gives no images"),
        (lambda: build("vit"), {"images": iter(())}, "make a new one"),
        (lambda: build("vit"), {"images": X[:, :, :16]}, r"shape \[24, 3, 16, 32\]"),
        (lambda: build("vit"), {"images": X / 0}, "NaN or infinite"),
        (lambda: build("vit"), {"images": "no/such/folder"}, r"calibration\.path=no/such/folder does not exist"),
        (lambda: build("vit"), {"evaluation": []}, "evaluation gives no images"),
        (lambda: build("vit"), {"evaluation": "nowhere"}, r"evaluation\.path=nowhere does not exist"),
        (lambda: build("vit"), {"macs": 1.5}, r"sparsity\.macs=1\.5 is out of range"),
        (lambda: build("vit"), {"macs": "much"}, r"sparsity\.macs=much"),
        (lambda: build("vit"), {"macs": 0.3, "joint": 0.3}, r"sparsity\.macs chooses the sizes"),
        (lambda: build("vit"), {"recipe": "secret"}, "secret"),
        (lambda: build("vit"), {"seed": -1}, r"seed=-1 is out of range"),
        (lambda: build("vit"), {"overrides": ("compensation.alhpa=0.3",)}, r"compensation\.alhpa.*alpha"),
        (lambda: build("vit"), {"overrides": ("compensation.alpha=3",)}, r"compensation\.alpha=3 is out of range"),
        (lambda: build("vit"), {"overrides": ("calibration.path=photos",)}, r"leave calibration\.path out"),
        (lambda: build("vit"), {"overrides": ("+model.args.depth=3",)}, "is not what timm builds"),
        (lambda: build("vit"), {"overrides": ("dry_run=true",)}, "dry_run=true is for the command"),
        (lambda: build("qk_norm"), {"qk": 0.5}, "normalise"),
    ],
)
def test_what_is_refused_is_said(make: Any, how: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CorpError, match=said):
        prune_model(make(), **{"images": X, **how})


def test_a_model_is_pruned_once() -> None:
    result = quickly(build("vit"), X)
    with pytest.raises(CorpError, match="corp has pruned this model already"):
        quickly(deepcopy(result.model), X)


def test_a_model_of_transformers_comes_back_as_timms(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="its models are what is pruned")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=16, num_labels=5)
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():  # of weights near 0, the epsilon of timm's norms would show
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    result = quickly(model, X, mlp=0.0)
    with torch.no_grad():
        require_same(result.model(X), model(X).logits)
    assert quickly(model, X).report.size.removed_percent.parameters > 10
    with pytest.raises(CorpError, match=r"how images are prepared for a ViTForImageClassification in memory"):
        quickly(model, tmp_path)
