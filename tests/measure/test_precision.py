"""evaluation.precision: what is computed in it, that the figures stay within rounding, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_cli.cli.main import main
from corp_cli.config.checkpoints import ExportConfig
from corp_cli.errors import CorpError
from corp_cli.measure import precision as precision_module
from corp_cli.measure.judge import measure
from corp_cli.measure.precision import products, require_precision, settled_precision
from corp_cli.measure.timing import throughput

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


class Probe(nn.Module):
    """A linear layer that remembers in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.seen.add(out.dtype)
        return out


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_models_are_judged_and_timed_in_the_precision(precision: str) -> None:
    model = Probe().eval()
    measure({"dense": model}, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))], precision=precision)
    throughput({"dense": model}, torch.randn(5, 4), 1, precision)
    assert model.seen == {getattr(torch, precision)}
    assert model.linear.weight.dtype == torch.float32


def test_products_on_a_cpu_are_in_float32_whoever_forms_them() -> None:
    x, y = (torch.randn(300, 300, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = x.double() @ y.double()
    with products("float32", CPU):
        found = x @ y
    assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="needs torch 2.9")
def test_onednn_is_asked_only_where_it_is_exact_and_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    mkldnn: Any = torch.backends.mkldnn
    settings = mkldnn.matmul
    before, seen = settings.fp32_precision, []
    for exact in (True, False):
        monkeypatch.setattr(precision_module, "onednn_is_exact", lambda exact=exact: exact)
        with suppress(RuntimeError), products("float32", CPU):
            seen.append(settings.fp32_precision)
            raise RuntimeError
        assert settings.fp32_precision == before
    with products("float32", torch.device("meta")):  # as on a GPU
        seen.append(settings.fp32_precision)
    assert seen == ["bf16", before, before]


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="needs torch 2.9")
def test_settings_that_follow_another_one_follow_it_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: Any = torch.backends
    for value in ("ieee", "tf32"):
        with products("float32", CPU):
            pass
        monkeypatch.setattr(backends, "fp32_precision", value)
        assert backends.mkldnn.matmul.fp32_precision == backends.cuda.matmul.fp32_precision == value


def test_whether_onednn_is_exact_does_not_depend_on_who_asks() -> None:
    answers = []
    for setting in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")):
        precision_module.onednn_is_exact.cache_clear()
        with setting:
            answers.append(precision_module.onednn_is_exact())
    assert len({*answers}) == 1


def test_logits_that_float16_cannot_hold_are_said() -> None:
    model = Probe().eval()
    nn.init.constant_(model.linear.weight, 6e4)
    batches = [(torch.full((2, 4), 10.0), torch.zeros(2, dtype=torch.long))]
    with pytest.raises(CorpError, match=r"the preprocessing of the images and evaluation\.precision\."):
        measure({"dense": model}, batches, precision="float16")
    measure({"dense": model}, batches, precision="bfloat16")


def evaluate(folder: Path, *args: str) -> dict[str, Any]:
    argv = ["evaluate", "model=vit_digits", "device=cpu", "evaluation.num_workers=0", *args, f"hydra.run.dir={folder}"]
    assert main(argv) == 0
    content: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return content


def test_bfloat16_gives_the_figures_of_float32_within_rounding(tmp_path: Path) -> None:
    """All 400 digits: logits differ, and hardly any image changes its class."""
    whole = evaluate(tmp_path / "whole")
    mixed = evaluate(tmp_path / "mixed", "evaluation.precision=bfloat16", "evaluation.throughput_batches=1")
    assert (whole["precision"], mixed["precision"]) == ("float32", "bfloat16")
    found, expected = mixed["results"]["model"], whole["results"]["model"]
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert found["top1"] == pytest.approx(expected["top1"], abs=0.5)
    assert found["top5"] == pytest.approx(expected["top5"], abs=0.5)
    assert mixed["throughput"]["images_per_second"]["model"] > 0
    assert mixed["warnings"] == []


@pytest.mark.slow
def test_a_run_judges_in_bfloat16_and_writes_the_same_weights(tmp_path: Path) -> None:
    few = ["device=cpu", "calibration.num_images=64", "calibration.num_workers=0", "evaluation.num_workers=0"]
    few += ["evaluation.num_images=200", "evaluation.throughput_batches=0", "compensation.mlp=affine"]
    reports = {}
    for precision in ("float32", "bfloat16"):
        folder = tmp_path / precision
        assert main(["prune", *few, f"evaluation.precision={precision}", f"hydra.run.dir={folder}"]) == 0
        reports[precision] = json.loads((folder / "report.json").read_text())["evaluation"]
        assert reports[precision]["precision"] == precision
    weights = [(tmp_path / name / "pruned.safetensors").read_bytes() for name in reports]
    assert weights[0] == weights[1]
    mixed, whole = reports["bfloat16"], reports["float32"]
    assert mixed["pruned"]["kl"] != whole["pruned"]["kl"]
    for model in ("dense", "uncompensated", "pruned"):
        assert mixed[model]["top1"] == pytest.approx(whole[model]["top1"], abs=1)
        assert mixed[model]["agreement"] == pytest.approx(whole[model]["agreement"], abs=1)


def test_what_a_device_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for precision in ("float32", "bfloat16", "float16"):
        require_precision(CPU, precision)

    def lacking(*_: Any) -> Any:
        raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.\nmore")

    monkeypatch.setattr(torch, "autocast", lacking)
    argv = ["evaluation.precision=bfloat16", "device=cpu", f"hydra.run.dir={tmp_path}/out"]
    for command in ("prune", "evaluate"):
        assert main([command, "model=vit_digits", *argv]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("corp: evaluation.precision=bfloat16 is not for the device cpu (Current CUDA Device")
        assert said.endswith("); use float32.")
        assert not (tmp_path / "out").exists()


def test_files_are_compared_in_float32() -> None:
    from corp_cli.config.images import EvaluationConfig

    with pytest.raises(CorpError, match=r"leave out evaluation\.precision=float16, and see dtype"):
        ExportConfig(checkpoint="a", evaluation=EvaluationConfig(precision="float16"))


# --- calibration.precision -------------------------------------------------------------------------------------


def set_by(api: str, tf32: bool) -> None:
    """Let a user say so, by the older or the newer switch of torch."""
    if api == "older":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    elif hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


SWITCHES = """
import sys, torch, pytest
from corp_cli.measure.precision import products
from tests.measure.test_precision import CPU, set_by

def allowed():
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32

for api, users in [("none", False), ("older", True), ("older", False), ("newer", True), ("newer", False)]:
    if api != "none":
        set_by(api, users)
    with products("tf32", CPU):
        assert allowed()
        with products("float32", CPU):
            assert not allowed()
        assert allowed()
    with pytest.raises(ZeroDivisionError), products("tf32", CPU):
        raise ZeroDivisionError
    if api != "newer" or hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        assert allowed() == users, (api, users)
"""


def test_products_are_in_tf32_for_a_while_whatever_the_user_set() -> None:
    """In a process of its own: the switches are those of the whole process, and cannot all be put back."""
    run = subprocess.run([sys.executable, "-c", SWITCHES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_cpu_has_no_tf32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settled_precision(CPU, "auto") == settled_precision(CPU, "float32") == "float32"
    argv = ["prune", "sparsity.joint=0.5", "device=cpu", "calibration.precision=tf32", f"hydra.run.dir={tmp_path}/run"]
    assert main(argv) == 2
    assert "calibration.precision=tf32 is for NVIDIA GPUs since Ampere" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("capability", "auto"), [((7, 5), "float32"), ((8, 0), "tf32"), ((9, 0), "tf32")])
def test_auto_is_what_the_gpu_has(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], auto: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")
    assert settled_precision(gpu, "auto") == auto
    assert settled_precision(gpu, "float32") == "float32"
    if auto == "float32":
        with pytest.raises(CorpError, match="since Ampere"):
            settled_precision(gpu, "tf32")
