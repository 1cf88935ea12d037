"""The smallest models and the largest cuts, weights of half precision, NaN in a checkpoint, other thread counts: a
whole run gives finite results or a sentence."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from corp_cli import load_config, load_pruned, prune
from corp_cli.cli.main import main
from corp_cli.errors import CorpError
from tests.support import variants

TINY = ["model.name=vit_tiny_patch16_224", "model.pretrained=false", "+model.args.img_size=32"]
SHAPE = {"patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 1, "mlp_ratio": 1.0, "num_classes": 3}
QUIET = ["device=cpu", "calibration.num_workers=0", "evaluation.num_workers=0", "evaluation.throughput_batches=0"]


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = torch.randint(0, 256, (12, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    save_file({"images": pixels}, "images.safetensors")


def run(*overrides: str, folder: str = "run", **shape: Any) -> dict[str, Any]:
    args = [f"+model.args.{key}={value}" for key, value in {**SHAPE, **shape}.items()]
    cfg = load_config("calibration.path=images.safetensors", *TINY, *QUIET, *args, *overrides)
    prune(cfg, Path(folder))
    state = load_file(f"{folder}/pruned.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    report: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())
    return report


SMALLEST: list[tuple[dict[str, Any], str]] = [
    ({}, "sparsity.joint=0.5"),
    ({}, "sparsity.joint=0.99"),
    ({"embed_dim": 2, "mlp_ratio": 0.5}, "sparsity.joint=0.5"),  # one hidden channel
    ({"num_heads": 16}, "sparsity.mlp=0.5"),  # heads of one dimension
    ({"depth": 2, "num_heads": 4}, "sparsity.heads=0.75"),
    ({"depth": 2}, "sparsity.macs=0.22"),
    ({}, "sparsity.params=0.09"),
]


@pytest.mark.parametrize(("shape", "sparsity"), SMALLEST)
def test_the_smallest_models_and_the_largest_cuts(shape: dict[str, Any], sparsity: str) -> None:
    require_smaller(shape, sparsity, "best", 12)


@pytest.mark.parametrize("recipe", ["best", "paper"])
def test_one_image(recipe: str) -> None:
    require_smaller({}, "sparsity.joint=0.5", recipe, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "count"), [("best", 1), ("paper", 1), ("paper", 12)])
@pytest.mark.parametrize(("shape", "sparsity"), SMALLEST)
def test_each_of_them(shape: dict[str, Any], sparsity: str, recipe: str, count: int) -> None:
    require_smaller(shape, sparsity, recipe, count)


def require_smaller(shape: dict[str, Any], sparsity: str, recipe: str, count: int) -> None:
    found = run(sparsity, f"recipe={recipe}", "sparsity.round_to=1", f"calibration.num_images={count}", **shape)
    assert found["size"]["pruned"]["parameters"] <= found["size"]["dense"]["parameters"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_pruned_as_what_they_are_in_float32(dtype: torch.dtype) -> None:
    model = variants.noisy(TINY[0].partition("=")[2], {**SHAPE, "img_size": 32})
    half = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_file(half, "half.safetensors")
    save_file({name: tensor.float() for name, tensor in half.items()}, "float.safetensors")
    for name in ("half", "float"):
        run("sparsity.joint=0.5", f"model.checkpoint={name}.safetensors", folder=name)
    found, wanted = (load_file(f"{name}/pruned.safetensors") for name in ("half", "float"))
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)  # the same computation


def test_a_weight_that_is_no_number_is_named() -> None:
    state = variants.noisy(TINY[0].partition("=")[2], {**SHAPE, "img_size": 32}).state_dict()
    state["blocks.0.mlp.fc1.weight"][0, 0] = torch.nan
    save_file(state, "nan.safetensors")
    with pytest.raises(CorpError, match=r"blocks\.0\.mlp\.fc1\.weight"):
        run("model.checkpoint=nan.safetensors")
    assert not Path("run/pruned.safetensors").exists()


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize("sparsity", ["sparsity.joint=0.5", pytest.param("sparsity.macs=0.4", marks=pytest.mark.slow)])
def test_other_thread_counts_change_logits_within_rounding(sparsity: str) -> None:
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    few = ["calibration.num_images=64", "evaluation.num_images=16"]
    threads, logits = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert main(["prune", sparsity, *QUIET, *few, f"hydra.run.dir={count}"]) == 0
            logits.append(variants.logits(load_pruned(f"{count}/pruned.safetensors"), x))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3 * float(logits[0].abs().max()))


KEYS = ("ranker.mlp", "compensation", "compensation.propagate")
BOTH = ("none", "sequential")
QUICK = [("random", "best", "none"), ("obs", "best", "sequential")]  # one of each way of repair
CHOICES = [
    *itertools.product(("activation", "obs", "variance", "magnitude", "random"), ("best",), BOTH),
    *itertools.product(("obs",), ("paper", "mean", "none"), BOTH),
]


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize(
    "choice", [pytest.param(c, id="-".join(c), marks=() if c in QUICK else pytest.mark.slow) for c in CHOICES]
)
def test_two_runs_with_one_seed_give_the_same_bits_whatever_is_chosen(choice: tuple[str, ...]) -> None:
    words = [f"{key}={value}" for key, value in zip(KEYS, choice, strict=True)]
    for folder in ("first", "again"):
        argv = ["prune", "seed=3", "calibration.num_images=32", "sparsity.joint=0.5", *QUIET, *words]
        assert main([*argv, "evaluation.num_images=16", f"hydra.run.dir={folder}"]) == 0
    first, again = (Path(folder, "pruned.safetensors").read_bytes() for folder in ("first", "again"))
    assert first == again
