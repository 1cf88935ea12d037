"""OpenVINO's files: converted from ONNX, written, and run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@cache
def core() -> Any:
    """OpenVINO, once in a process: its CPU plugin sets a stack for signals, and takes it away when it goes.

    With several of them the system is left with a stack that is gone, and the next Ctrl-C is a segmentation fault.
    """
    import openvino

    return openvino.Core()


class OpenvinoModel(nn.Module):
    """A file on the CPU by OpenVINO, as a module: float32 images → float32 logits.

    In float32, so that it can be compared: by itself OpenVINO takes bfloat16 where the processor has it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.compiled: Any = core().compile_model(path, "CPU", settings)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] → logits [B, K]."""
        return torch.from_numpy(self.compiled(images.numpy())[0].copy())


def write_openvino(source: Path, path: Path, half: bool) -> None:
    """Write the ONNX file `source` as `path`, an .xml, and its weights beside it, in float16 if they are to be `half`.

    ONNX on the way keeps the names of input and output, the size of an image and the metadata; OpenVINO's reader of
    torch.export loses the first two. read_model is what convert_model calls, without the telemetry of the latter.
    """
    import openvino

    openvino.save_model(core().read_model(source), path, compress_to_fp16=half)
