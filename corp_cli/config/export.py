"""The schema of `export.*`: files for other runtimes. Imports neither torch nor timm.

`ExportOptions` is the group `export` of `corp prune`; `corp export` takes the same choices for one format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional

from corp_cli.config.images import BATCH
from corp_cli.config.ranges import require_at_least, require_choice, require_fraction, require_texts, words
from corp_cli.errors import CorpError

FORMATS = ("onnx", "openvino", "torchexport", "torchscript", "timm")
WEIGHTS = ("float32", "float16", "bfloat16")
INT8 = ("none", "dynamic", "static", "both")
OPSETS = (18, 23)  # the oldest that torch writes without conversion, the newest that was tried
DEFAULT_OPSET = 20  # the first with GELU
INT8_IMAGES = 128


@dataclass
class ExportOptions:
    """Files to write besides pruned.safetensors."""

    formats: Any = field(default_factory=list)  # several, or one without brackets
    dtype: str = "float32"  # of the weights
    int8: Any = "none"  # onnx: more files, quantised by ONNX Runtime; true is dynamic
    int8_images: int = INT8_IMAGES  # static: calibration images that ranges of activations are measured on
    opset: int = DEFAULT_OPSET  # onnx

    def __post_init__(self) -> None:
        self.formats = words("export.formats", self.formats, FORMATS)
        require_choice("export.", self, formats=FORMATS, dtype=WEIGHTS)
        require_at_least("export.", self, int8_images=1)
        self.int8 = require_export("export.", self.formats, self.dtype, self.int8, self.opset)

    def static(self) -> bool:
        """Whether a file is asked for that images are needed to quantise."""
        return self.int8 in ("static", "both")


@dataclass
class RangesConfig:
    """The unlabelled images of `corp export` that static int8 measures ranges of activations on."""

    path: Any = None  # as that of evaluation; None: those of evaluation, or of a bundled model
    split: str = "train"  # of a timm dataset
    root: Optional[str] = None  # where a timm dataset lies, or is cached
    image_key: Optional[str] = None  # the column of a timm dataset that holds the images
    label_key: Optional[str] = None  # and the one that holds the classes
    num_images: int = INT8_IMAGES
    batch_size: int = BATCH
    num_workers: Optional[int] = None  # threads that load images; None: one a core, at most four
    max_bad: float = 0.01  # fraction of the images that may be unreadable

    def __post_init__(self) -> None:
        require_texts("calibration.path", self.path)
        require_fraction("calibration.", self, "max_bad")
        require_at_least("calibration.", self, num_images=1, batch_size=1, num_workers=0)


def require_export(prefix: str, formats: List[str], dtype: str, int8: Any, opset: int) -> str:
    """One of INT8, which `int8` stands for. Raises CorpError, naming keys that begin with `prefix`, unless all fit."""
    if not OPSETS[0] <= opset <= OPSETS[1]:
        raise CorpError(f"{prefix}opset={opset} is out of range; it must be from {OPSETS[0]} to {OPSETS[1]}.")
    if "openvino" in formats and dtype == "bfloat16":
        raise CorpError(
            f"{prefix}dtype=bfloat16 is no format of OpenVINO's weights; use float16, or float32, which it computes in "
            "bfloat16 by itself where the processor can."
        )
    meant = {True: "dynamic", False: "none"}[int8] if isinstance(int8, bool) else int8
    asked = f"{prefix}int8={'null' if int8 is None else str(int8).lower()}"
    if meant not in INT8:
        raise CorpError(f"{asked} is not a choice; use one of {', '.join(INT8)}, or true for dynamic.")
    if meant != "none" and "onnx" not in formats:
        raise CorpError(f"{asked} quantises an ONNX file; ask for the format onnx, or leave it out.")
    if meant != "none" and dtype != "float32":
        raise CorpError(f"{asked} quantises float32 weights; leave out {prefix}dtype={dtype}.")
    return str(meant)
