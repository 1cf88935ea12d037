"""ONNX files in int8, by ONNX Runtime's own quantiser: the linear layers alone, a scale per output channel.

Linear layers are nearly all of a ViT's weights and MACs. What lies between them stays in float32: LayerNorm, softmax
and GELU have outliers that eight bits do not hold, and of the two products of attention one takes what softmax gives.
The patch embedding, a convolution that sees pixels, stays too. The residual stream is never rounded. Weights take seven
of their eight bits (`reduce_range`): x86-64 CPUs without VNNI add products in 16 bits, which eight would overflow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from corp_cli.export.onnx_files import INPUT, is_large, save

LINEAR = ["MatMul", "Gemm"]
Batches = Callable[[], Iterable[Tensor]]  # preprocessed images, each time anew


class Reader:
    """A CalibrationDataReader, by what it does, for ONNX Runtime: batch after batch, then None."""

    def __init__(self, batches: Batches) -> None:
        self.left = iter(batches())

    def get_next(self) -> dict[str, Any] | None:
        """What the file is run on next."""
        images = next(self.left, None)
        return None if images is None else {INPUT: images.numpy()}


def quantise(source: Path, path: Path) -> None:
    """Write the float32 file `source` with its linear layers in int8 as `path`.

    Activations are quantised as they come, so that no images are needed.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    proto = loaded(source)
    # Without this, ONNX Runtime logs advice to preprocess; torch's exporter has done what that would do.
    proto.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with quiet_root():
        quantize_dynamic(
            proto,
            path,
            op_types_to_quantize=LINEAR,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            use_external_data_format=is_large(proto),
        )


def quantise_static(source: Path, path: Path, batches: Batches) -> None:
    """Write the float32 file `source` with its linear layers in int8 as `path`, ranges measured on images [B, C, H, W].

    A range is from the least to the largest activation seen. Percentiles were no better on the bundled model, and ONNX
    Runtime keeps every activation of every image in memory for them.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    proto = loaded(source)
    large, bare, ready = is_large(proto), path.with_name(f"bare.{path.name}"), path.with_name(f"ready.{path.name}")
    save(proto, bare)
    with quiet_root():
        # Its symbolic inference does not know all operators; of linear layers no shape is needed that it would find.
        quant_pre_process(bare, ready, skip_symbolic_shape=True, save_as_external_data=large)
        quantize_static(
            ready,
            path,
            Reader(batches),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=LINEAR,
            nodes_to_quantize=weighted(onnx.load(ready, load_external_data=False)),
            per_channel=True,
            # Unsigned, with a zero point: GELU gives no less than -0.17, so that a symmetric range wastes half of it.
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            calibrate_method=CalibrationMethod.MinMax,
            use_external_data_format=large,
            # What a layer puts out stays as its sums are. Rounded as well, logits of the bundled model are off by up to
            # 0.43 in place of 0.09: an image beyond the ranges is then cut off before every residual sum.
            extra_options={"OpTypesToExcludeOutputQuantization": LINEAR},
        )


def loaded(path: Path) -> Any:
    """The file without the shapes of between, which ONNX Runtime infers itself and some exporters get wrong."""
    import onnx

    proto: Any = onnx.load(path)
    proto.graph.ClearField("value_info")
    return proto


def weighted(proto: Any) -> list[str]:
    """The names of the linear layers: products with a weight, and not of activations with each other."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [node.name for node in proto.graph.node if node.op_type in LINEAR and node.input[1] in weights]


@contextmanager
def quiet_root() -> Iterator[None]:
    """ONNX Runtime logs through the root, which that gives a handler for stderr; afterwards it has its own again."""
    handlers = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers = handlers
