"""ONNX files: written by torch's exporter, slimmed by OnnxSlim, and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIMIT = 2**31 - 2**20  # bytes of weights that fit into one protobuf file; more go to a second file
INPUT, OUTPUT = "images", "logits"


class OnnxModel(nn.Module):
    """A file on the CPU provider of ONNX Runtime, as a module: float32 images → float32 logits."""

    def __init__(self, path: Path, optimise: bool = True) -> None:
        super().__init__()
        import onnxruntime

        levels, options = onnxruntime.GraphOptimizationLevel, onnxruntime.SessionOptions()
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
        options.intra_op_num_threads = torch.get_num_threads()
        # Waiting threads that spin would slow the models that take turns with this one.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3  # errors
        self.session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def image_shape(self) -> tuple[int, ...]:
        """Of one image: channels, height, width."""
        return tuple(self.session.get_inputs()[0].shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] → logits [B, K]."""
        (logits,) = self.session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(logits)


@torch.inference_mode()
def write_onnx(model: nn.Module, example: Tensor, path: Path, opset: int, about: dict[str, str]) -> None:
    """Write `model` with a dynamic batch and, as the file's metadata, `about`."""
    import onnx

    program: Any = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        opset_version=opset,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    proto = program.model_proto
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.initializer, *proto.graph.input, proto.graph):
        part.ClearField("metadata_props")  # stack traces with the paths of this machine
        part.ClearField("doc_string")
    onnx.helper.set_model_props(proto, about)
    save(proto, path)


def is_large(proto: Any) -> bool:
    """Whether the weights of `proto` need a second file."""
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > LIMIT


def save(proto: Any, path: Path) -> None:
    """Write `proto`, with its weights in a second file where they are too large for one."""
    import onnx

    second = path.with_name(f"{path.name}.data")
    second.unlink(missing_ok=True)  # onnx would append to it
    onnx.save(proto, path, save_as_external_data=is_large(proto), location=second.name)


def store_bfloat16(path: Path) -> None:
    """Store the weights of a float32 file that are rounded to bfloat16 as such, with a cast back behind each.

    ONNX Runtime computes nothing in bfloat16 on a CPU; it undoes these casts once, when it loads the file.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    proto: Any = onnx.load(path)
    casts = []
    for tensor in proto.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        bits = numpy_helper.to_array(tensor).view(np.uint32)
        if bits.size == 1 or np.any(bits & 0xFFFF):  # constants of the graph stay as they are
            continue
        name, upper = tensor.name, (bits >> 16).astype("<u2").tobytes()
        tensor.CopyFrom(helper.make_tensor(f"{name}.bfloat16", TensorProto.BFLOAT16, bits.shape, upper, raw=True))
        casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    save(proto, path)


def slimmed(path: Path) -> Path:
    """The file that OnnxSlim makes of the file `path`, beside it."""
    import onnxslim

    slim = path.with_name(f"slim.{path.name}")
    save(onnxslim.slim(str(path)), slim)
    return slim
