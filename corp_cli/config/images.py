"""The part of the schema that is about images: how they are prepared, which to calibrate on, and which to judge on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional

from corp_cli.config.ranges import require_at_least, require_choice, require_fraction, require_texts
from corp_cli.errors import CorpError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
DTYPES = ("float32", "bfloat16", "float16")
OFFLOADS = ("auto", "none", "blocks")
PRODUCTS = ("auto", "float32", "tf32")
CROP_MODES = ("center", "squash", "border")
BATCH = 32  # images that go together where nothing says how many
LEAST_CROP = 0.1  # a smaller one resizes images to more pixels than fit in memory


@dataclass
class DataConfig:
    """How images are prepared for the model; None is what timm knows of the model."""

    input_size: Any = None  # height and width: one number or [H, W]
    interpolation: Optional[str] = None
    crop_pct: Optional[float] = None  # side of the crop over the side that the image is resized to
    crop_mode: Optional[str] = None
    mean: Optional[List[float]] = None  # per channel, of values in [0, 1]
    std: Optional[List[float]] = None

    def __post_init__(self) -> None:
        if self.input_size is not None:
            size = [self.input_size] * 2 if isinstance(self.input_size, int) else self.input_size
            if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
                raise CorpError(f"data.input_size={self.input_size} is not a size; give one number or [height,width].")
            self.input_size = size
        require_choice("data.", self, interpolation=INTERPOLATIONS, crop_mode=CROP_MODES)
        if self.crop_pct is not None and not LEAST_CROP <= self.crop_pct <= 1:
            raise CorpError(f"data.crop_pct={self.crop_pct:g} is out of range; it must be from {LEAST_CROP} to 1.")
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not (values and all(0 <= value <= 1 for value in values)):
                raise CorpError(f"data.{key}={values} is out of range; give values in [0, 1], one per channel.")
        if self.std is not None and not all(self.std):
            raise CorpError(f"data.std={self.std} is out of range; every value must be above 0.")


@dataclass
class CalibrationConfig:
    """The unlabelled images that the statistics are measured on."""

    path: Any = None  # a folder, list or file of images, several such, or a timm dataset; a bundled model has its own
    split: str = "train"  # of a timm dataset
    root: Optional[str] = None  # where a timm dataset lies, or is cached
    image_key: Optional[str] = None  # the column of a timm dataset that holds the images
    label_key: Optional[str] = None  # and the one that holds the classes
    num_images: int = 1024
    batch_size: Optional[int] = None  # images that go through the model together; None: 32, more where a GPU has room
    num_workers: Optional[int] = None  # threads that load images; None: one a core, at most four
    max_bad: float = 0.01  # fraction of the images that may be unreadable
    cache: Optional[str] = None  # a folder, or a .safetensors, where statistics are kept for later runs
    offload: str = "auto"  # blocks: weights stay on the host, and one block at a time comes to the device
    scratch: Optional[str] = None  # a folder for the tokens of all images; None: the memory of the host
    precision: str = "auto"  # of the products of float32 matrices, but where models are judged; auto: the fastest

    def __post_init__(self) -> None:
        require_texts("calibration.path", self.path)
        require_fraction("calibration.", self, "max_bad")
        require_at_least("calibration.", self, num_images=1, batch_size=1, num_workers=0)
        require_choice("calibration.", self, offload=OFFLOADS, precision=PRODUCTS)

    @property
    def batch(self) -> int:
        """How many images go together: as asked, or as a CPU does."""
        return self.batch_size or BATCH


@dataclass
class EvaluationConfig:
    """The images that fidelity, accuracy and throughput are measured on."""

    path: Any = None  # as that of calibration; labelled when its sub-folders name classes; else fidelity only
    split: str = "validation"  # of a timm dataset
    root: Optional[str] = None  # where a timm dataset lies, or is cached
    image_key: Optional[str] = None  # the column of a timm dataset that holds the images
    label_key: Optional[str] = None  # and the one that holds the classes
    labels: Optional[str] = None  # a file that tells the class of every image
    class_map: Optional[str] = None  # a file that tells the index of every class name
    num_images: Optional[int] = None  # all of them
    batch_size: int = 64
    num_workers: Optional[int] = None  # threads that load images; None: one a core, at most four
    max_bad: float = 0.01  # fraction of the images that may be unreadable
    throughput_batches: int = 10  # timed batches of the dense and the pruned model, in turn; 0 skips it
    precision: str = "float32"  # of the passes that judge and time; below it, mixed, by torch.autocast

    def __post_init__(self) -> None:
        require_texts("evaluation.path", self.path)
        require_fraction("evaluation.", self, "max_bad")
        require_at_least("evaluation.", self, num_images=1, batch_size=1, num_workers=0, throughput_batches=0)
        require_choice("evaluation.", self, precision=DTYPES)
