"""`corp bench`: what it times and writes, and what it makes of timings. Nothing here depends on speed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from corp_cli.cli.main import main
from corp_cli.commands import bench as module
from corp_cli.commands.bench import explain, time_setting, timing
from corp_cli.config.checkpoints import BenchConfig
from corp_cli.measure.timing import pass_seconds
from corp_cli.report.schema import Setting, Timing, Timings

QUICK = ["device=cpu", "runs=2", "batch_sizes=[1,3]", "dtypes=[float32,bfloat16]"]
MACS = {"dense": 100, "pruned": 60}


def bench(folder: Path, *args: str) -> dict[str, Any]:
    assert main(["bench", *QUICK, *args, f"hydra.run.dir={folder}"]) == 0
    content: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return content


def test_checkpoint_and_its_dense_model(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(tmp_path / "bench", f"checkpoint={tiny_run}/pruned.safetensors")
    report = json.loads((tiny_run / "report.json").read_text())
    assert found["size"] == {name: report["size"][name] for name in ("dense", "pruned")}
    rows = found["settings"]
    assert [(row["dtype"], row["batch_size"]) for row in rows] == [
        ("float32", 1),
        ("float32", 3),
        ("bfloat16", 1),
        ("bfloat16", 3),
    ]
    for row in rows:
        dense, pruned = row["timings"]["dense"], row["timings"]["pruned"]
        assert dense["runs"] == pruned["runs"] == 2
        assert 0 < dense["p50_ms"] <= dense["p95_ms"]
        assert row["speedup"] == pytest.approx(dense["p50_ms"] / pruned["p50_ms"], rel=1e-4)
        assert pruned["images_per_second"] == pytest.approx(1e3 * row["batch_size"] / pruned["p50_ms"], rel=1e-4)
    assert "img/s" in capsys.readouterr().out


def test_dense_model_alone_and_without_weights(tmp_path: Path) -> None:
    found = bench(tmp_path, "model.name=vit_tiny_patch16_224", "+model.args={depth:1,img_size:32}")
    assert found["size"]["pruned"] is None
    assert found["model"]["data"]["input_size"] == [3, 32, 32]
    assert all(row["timings"]["pruned"] is None and row["speedup"] is None for row in found["settings"])


def test_models_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    class Recorder(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.name)
            return x

    models: dict[str, nn.Module] = {"dense": Recorder("dense"), "pruned": Recorder("pruned")}
    assert [len(times) for times in pass_seconds(models, torch.zeros(1), 2).values()] == [2, 2]
    assert calls == ["dense", "pruned"] * 3
    assert [len(times) for times in pass_seconds(models, torch.zeros(1), 9, max_seconds=0).values()] == [3, 3]


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    def setting(error: Exception, dtype: torch.dtype) -> Setting:
        model = Fails(error)
        cfg = BenchConfig(checkpoint="x", runs=1)
        return time_setting({"dense": model}, {"dense": 1}, torch.zeros(2, 3, dtype=dtype), cfg)

    found = setting(torch.OutOfMemoryError("CUDA out of memory."), torch.float32)
    assert (found.failure, found.timings, found.speedup) == ("out of memory", Timings(), None)
    found = setting(RuntimeError("\"addmm\" not implemented for 'Half'\nmore"), torch.float16)
    assert found.failure == "not supported by the device (\"addmm\" not implemented for 'Half')"
    with pytest.raises(RuntimeError, match="a bug"):
        setting(RuntimeError("a bug"), torch.float32)


def test_percentiles() -> None:
    found = timing([i / 1000 for i in range(1, 102)], 4, 2 * 10**9, None)
    assert found.p50_ms == pytest.approx(51)
    assert found.p95_ms == pytest.approx(96)
    assert found.images_per_second == pytest.approx(4 / 0.051)
    assert found.gmacs_per_second == pytest.approx(8 / 0.051)
    assert timing([0.5], 1, 1, None).p95_ms == 500


# What limits the gain


def setting(dense: float, pruned: float, batch: int = 8, dtype: str = "float32", scatter: float = 0.0) -> Setting:
    """Median passes in ms, and how much longer the slowest took; the models of MACS."""
    timings = {
        name: Timing(20, ms, ms + scatter, 1e3 * batch / ms, batch * MACS[name] / ms, None)
        for name, ms in (("dense", dense), ("pruned", pruned))
    }
    return Setting(dtype, batch, Timings(**timings), dense / pruned, None, [])


@pytest.mark.parametrize(
    ("fast", "macs"),
    [
        (setting(10, 6.6), MACS),
        (setting(10, 11), {"dense": 100, "pruned": 100}),
        (Setting("float16", 8, Timings(), None, "out of memory", []), MACS),
        (Setting("float32", 8, Timings(dense=setting(10, 10).timings.dense), None, None, []), {"dense": 100}),
    ],
)
def test_nothing_is_explained(fast: Setting, macs: dict[str, int]) -> None:
    """Where it is as fast as MACs promise, where nothing was cut or timed, and of a dense model alone."""
    assert explain(fast, [fast, setting(1, 1)], macs) == []


@pytest.mark.parametrize(
    ("slow", "other", "limit"),
    [
        (setting(10, 10, batch=1), setting(11, 9), "x1.00 of x1.67, too small a batch to keep the device busy"),
        (setting(10, 10), setting(1, 1, dtype="float16"), "x1.00 of x1.67, narrower layers do 60% of the MAC/s"),
        (setting(10, 7), setting(10, 7, batch=9), "x1.43 of x1.67, narrower layers do 86% of the MAC/s"),
        (
            setting(10, 9.5, scatter=0.6),
            setting(10, 9),
            "x1.05 of x1.67, passes scatter more than models differ",
        ),
    ],
)
def test_what_limits_a_setting_is_a_short_line(slow: Setting, other: Setting, limit: str) -> None:
    """First noise, then how busy the dense model keeps the device in the same dtype, then the rate of the layers."""
    (said,) = explain(slow, [slow, other], MACS)
    assert said == limit
    assert len(f"bfloat16, batch 1024: {said}") <= 80


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_table_fits_in_80_columns(tiny_run: Path, tmp_path: Path, device: str) -> None:
    """Slow models with much memory and fast ones, in milliseconds that are no powers of ten."""
    cfg = BenchConfig(f"{tiny_run}/pruned.safetensors", batch_sizes=[1], dtypes=["float32"], runs=1, device="cpu")
    found = module.bench(cfg, tmp_path)
    times = Timing(20, 1863.2, 1900.0, 13772.4, 2.0, 123456.0), Timing(20, 0.01234, 0.02, 224.2, 3.0, 98765.0)
    rows = [Setting("bfloat16", 1024, Timings(*times), 150991.9, None, [])] * 2
    found = replace(found, settings=rows, environment=replace(found.environment, device=device))
    written = io.StringIO()
    Console(width=80, file=written).print(module.table(found))
    text = written.getvalue()
    assert "…" not in text
    assert "1863" in text
    assert "0.0123" in text
    assert ("123456" in text) == (device == "cuda:0")
