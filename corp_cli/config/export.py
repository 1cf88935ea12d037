"""The schema of `export.*`: files for other runtimes. Imports neither torch nor timm.

`ExportOptions` is the group `export` of `corp prune`; `corp export` takes the same choices for one format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List

from corp_cli.config.ranges import require_choice
from corp_cli.errors import CorpError

FORMATS = ("onnx", "torchexport", "torchscript", "timm")
WEIGHTS = ("float32", "float16", "bfloat16")
OPSETS = (18, 23)  # the oldest that torch writes without conversion, the newest that was tried
DEFAULT_OPSET = 20  # the first with GELU


@dataclass
class ExportOptions:
    """Files to write besides pruned.safetensors."""

    formats: List[str] = field(default_factory=list)
    dtype: str = "float32"  # of the weights
    int8: bool = False  # onnx: one more file, quantised by ONNX Runtime
    opset: int = DEFAULT_OPSET  # onnx

    def __post_init__(self) -> None:
        require_choice("export.", self, formats=FORMATS, dtype=WEIGHTS)
        require_export("export.", self.formats, self.dtype, self.int8, self.opset)


def require_export(prefix: str, formats: List[str], dtype: str, int8: bool, opset: int) -> None:
    """Raise CorpError unless the choices suit each other, naming keys that begin with `prefix`."""
    if not OPSETS[0] <= opset <= OPSETS[1]:
        raise CorpError(f"{prefix}opset={opset} is out of range; it must be from {OPSETS[0]} to {OPSETS[1]}.")
    if int8 and "onnx" not in formats:
        raise CorpError(f"{prefix}int8=true quantises an ONNX file; ask for the format onnx, or leave it out.")
    if int8 and dtype != "float32":
        raise CorpError(f"{prefix}int8=true quantises float32 weights; leave out {prefix}dtype={dtype}.")
