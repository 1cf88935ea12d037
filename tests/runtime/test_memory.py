"""Out of memory: batches are halved, nothing is counted twice, and the report says so."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.measure import judge as evaluate
from corp_cli.method.calibrate import Calibration
from corp_cli.pipeline import prune
from corp_cli.runtime import console
from corp_cli.runtime.memory import halving_batches, is_out_of_memory, plain_memory_errors
from tests.support.recipes import PAPER

CPU_WORDS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError(CPU_WORDS), MemoryError()]
OTHERS = [
    RuntimeError("could not create a primitive"),  # oneDNN
    RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


pytestmark = pytest.mark.usefixtures("tiny_digits")


def config() -> PruneConfig:
    return PruneConfig(
        **PAPER,
        calibration=CalibrationConfig(num_images=64, batch_size=32, num_workers=0),
        evaluation=EvaluationConfig(num_images=64, batch_size=32, num_workers=0, throughput_batches=0),
        device="cpu",
    )


@pytest.mark.parametrize("error", [*ERRORS, *OTHERS], ids=lambda error: f"{error}"[:30])
def test_what_counts_as_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(CorpError, match="Memory ran out"), plain_memory_errors():
        raise error


def test_the_real_words_of_the_allocators() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(numpys.value)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_halved_until_it_fits(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    tried, warnings = [], console.collect_warnings()

    def work(cfg: CalibrationConfig) -> str:
        tried.append(cfg.batch_size)
        if cfg.batch > 8:
            raise error
        return "done"

    assert halving_batches(work, config().calibration, "calibration") == "done"
    assert tried == [32, 16, 8]
    assert warnings == [
        "memory ran out with calibration.batch_size=32; going on with 16.",
        "memory ran out with calibration.batch_size=16; going on with 8.",
    ]
    assert capsys.readouterr().err.count("corp: warning: memory ran out") == 2


def test_not_even_one_image_fits() -> None:
    def work(cfg: CalibrationConfig) -> None:
        raise MemoryError

    with pytest.raises(CorpError, match=r"even with calibration\.batch_size=1"):
        halving_batches(work, config().calibration, "calibration")


def test_other_errors_pass() -> None:
    def work(cfg: CalibrationConfig) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        halving_batches(work, config().calibration, "calibration")


def test_statistics_of_a_half_processed_batch_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory runs out after one block has taken in the batch: the result is that of batches of half the size."""
    small = config()
    small = replace(small, calibration=replace(small.calibration, batch_size=16))
    expected = prune(small).model.state_dict()
    add = Calibration.add

    def tight(self: Calibration, images: Tensor) -> None:
        def run_out(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        handle = self.model.get_submodule("blocks.1").register_forward_pre_hook(run_out) if len(images) > 16 else None
        try:
            add(self, images)
        finally:
            if handle:
                handle.remove()

    monkeypatch.setattr(Calibration, "add", tight)
    found = prune(config(), tmp_path).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    message = "memory ran out with calibration.batch_size=32; going on with 16."
    assert message in json.loads((tmp_path / "report.json").read_text())["warnings"]
    assert message in capsys.readouterr().err


def test_evaluation_is_halved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, measure = prune(config()).report.evaluation, evaluate.measure

    def tight(
        models: dict[str, nn.Module], batches: Iterator[tuple[Tensor, Tensor]], precision: str
    ) -> dict[str, evaluate.Running]:
        def checked() -> Iterator[tuple[Tensor, Tensor]]:
            for images, labels in batches:
                if len(images) > 8:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                yield images, labels

        return measure(models, checked(), precision=precision)

    monkeypatch.setattr(evaluate, "measure", tight)
    report = prune(config()).report
    assert report.warnings[-1] == "memory ran out with evaluation.batch_size=16; going on with 8."
    assert report.evaluation.pruned.top1 == expected.pruned.top1
    assert report.evaluation.images == 64
