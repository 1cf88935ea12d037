"""Files for other runtimes: written, run against the PyTorch model, and moved into place."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.config.export import ExportOptions
from corp_cli.errors import CorpError
from corp_cli.export.onnx_files import OnnxModel, slimmed, store_bfloat16, write_onnx
from corp_cli.export.openvino_files import OpenvinoModel, write_openvino
from corp_cli.export.parity import CLOSE
from corp_cli.export.quantise import Batches, quantise, quantise_static
from corp_cli.export.timm_entry import create, write_config
from corp_cli.files.checkpoint import write_checkpoint
from corp_cli.files.fetch import WEIGHTS
from corp_cli.measure.results import File, Parity
from corp_cli.models.loaded import LoadedModel
from corp_cli.runtime import console
from corp_cli.runtime.memory import is_out_of_memory
from corp_cli.version import __version__

SCRATCH = ".export.partial"
PACKAGES = {  # that a format needs besides corp's own
    "onnx": ("onnx", "onnxruntime", "onnxscript", "onnxslim"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
ONNX_TORCH = (2, 6)  # whose exporter is the first with everything that is used here


@dataclass(frozen=True)
class Written:
    """A file (or folder) that was written, and the ways to run it: name of the optimiser → module."""

    path: Path
    format: str
    dtype: str
    runs: dict[str, nn.Module]
    opset: int | None = None
    quantisation: str | None = None

    def parts(self) -> list[Path]:
        """The file, with the second one of OpenVINO and of large ONNX models, or the folder."""
        weights = self.path.with_suffix(".bin" if self.path.suffix == ".xml" else f"{self.path.suffix}.data")
        return [self.path, *([weights] if weights.is_file() else [])]

    def judged(self, parity: dict[str, Parity]) -> File:
        """What the report says of it."""
        parts = [*self.parts(), *self.path.rglob("*")]
        size = sum(part.stat().st_size for part in parts if part.is_file())
        found = {name: parity[f"{self.path.name}, {name}"] for name in self.runs}
        weights = next((part.name for part in self.parts()[1:]), None)
        return File(self.path.name, weights, self.format, self.dtype, self.quantisation, self.opset, size, found)


class Interface(nn.Module):
    """A copy of a model that computes in `dtype`, with weights rounded to `weights`, for float32 images and logits."""

    def __init__(self, source: LoadedModel, weights: str, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.model = weighted(source, weights).to(self.dtype)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] → logits [B, K]."""
        logits: Tensor = self.model(images.to(self.dtype))
        return logits.float()


def weighted(source: LoadedModel, dtype: str) -> nn.Module:
    """A copy of the model with its weights in `dtype`."""
    return copy.deepcopy(source.model).to(getattr(torch, dtype))


def example(source: LoadedModel) -> Tensor:
    """Images to record the model with: two, since a batch of one is taken for a constant."""
    return torch.zeros(2, *source.spec.data["input_size"])


def onnx_files(source: LoadedModel, options: ExportOptions, folder: Path, batches: Batches | None) -> list[Written]:
    """model.onnx and, if asked for, model.int8.onnx and model.int8.static.onnx."""
    path = folder / "model.onnx"
    plain_onnx(source, options, path)
    runs: dict[str, nn.Module] = {
        "none": OnnxModel(path, optimise=False),
        "onnxruntime": OnnxModel(path),
        "onnxslim": OnnxModel(slimmed(path)),
    }
    files = [Written(path, "onnx", options.dtype, runs, options.opset)]
    if options.int8 in ("dynamic", "both"):
        small = folder / "model.int8.onnx"
        quantise(path, small)
        files.append(replace(files[0], path=small, runs={"onnxruntime": OnnxModel(small)}, quantisation="int8"))
    if options.static():
        assert batches is not None, "static int8 needs images"
        small = folder / "model.int8.static.onnx"
        quantise_static(path, small, batches)
        files.append(replace(files[0], path=small, runs={"onnxruntime": OnnxModel(small)}, quantisation="int8_static"))
    return files


def plain_onnx(source: LoadedModel, options: ExportOptions, path: Path) -> None:
    """Write the ONNX file of the model, with the weights that are asked for."""
    about = {"corp": __version__, "timm_name": source.spec.name, "preprocessing": json.dumps(source.spec.data)}
    computed = "float32" if options.dtype == "bfloat16" else options.dtype
    write_onnx(Interface(source, options.dtype, computed), example(source), path, options.opset, about)
    if options.dtype == "bfloat16":
        store_bfloat16(path)


def openvino_files(source: LoadedModel, options: ExportOptions, folder: Path, _: Batches | None) -> list[Written]:
    """model.xml, with its weights in model.bin."""
    between, path = folder / "openvino.onnx", folder / "model.xml"
    plain_onnx(source, replace(options, dtype="float32"), between)
    write_openvino(between, path, half=options.dtype == "float16")
    return [Written(path, "openvino", options.dtype, {"openvino": OpenvinoModel(path)})]


@torch.inference_mode()
def torchexport_files(source: LoadedModel, options: ExportOptions, folder: Path, _: Batches | None) -> list[Written]:
    """model.pt2, for torch.export.load and AOTInductor."""
    model, path = Interface(source, options.dtype, options.dtype), folder / "model.pt2"
    program = torch.export.export(model, (example(source),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the paths of this machine
    torch.export.save(program, path)
    return [Written(path, "torchexport", options.dtype, {"none": torch.export.load(path).module()})]


@torch.inference_mode()
def torchscript_files(source: LoadedModel, options: ExportOptions, folder: Path, _: Batches | None) -> list[Written]:
    """model.ts, for torch.jit.load and libtorch."""
    model, path = Interface(source, options.dtype, options.dtype), folder / "model.ts"
    torch.jit.save(torch.jit.trace(model, example(source), check_trace=False), path)
    return [Written(path, "torchscript", options.dtype, {"none": torch.jit.load(path)})]


def timm_files(source: LoadedModel, options: ExportOptions, folder: Path, _: Batches | None) -> list[Written]:
    """timm/, a folder that timm.create_model reads once corp_cli.register() was called."""
    if source.manifest is None:
        raise CorpError(f"format=timm is for pruned models, and timm has {source.spec.name} already; leave it out.")
    path = folder / "timm"
    path.mkdir()
    manifest = replace(source.manifest, pruned_sha256=None)  # a cast is no training
    write_checkpoint(weighted(source, options.dtype), manifest, path / WEIGHTS)
    write_config(source.spec, path)
    return [Written(path, "timm", options.dtype, {"none": create(path)})]


Writer = Callable[[LoadedModel, ExportOptions, Path, Batches | None], list[Written]]
WRITERS: dict[str, Writer] = {
    "onnx": onnx_files,
    "openvino": openvino_files,
    "torchexport": torchexport_files,
    "torchscript": torchscript_files,
    "timm": timm_files,
}


def require_packages(options: ExportOptions) -> None:
    """Raise CorpError where a format asked for needs a package that is not installed, or a newer torch."""
    for name in options.formats:
        if missing := [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]:
            names = " ".join(missing)
            raise CorpError(f"The format {name} needs packages that are not installed; run: pip install {names}")
        if name in PACKAGES and tuple(map(int, torch.__version__.split(".")[:2])) < ONNX_TORCH:
            wanted = ".".join(map(str, ONNX_TORCH))
            raise CorpError(
                f"The format {name} needs torch {wanted} or newer, and this is {torch.__version__}; update torch."
            )


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder within `folder` that is gone afterwards: files are moved out of it when they are known to work."""
    path = folder / SCRATCH
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_files(
    source: LoadedModel, options: ExportOptions, folder: Path, batches: Batches | None = None
) -> list[Written]:
    """Every format asked for, in `folder`; static int8 needs `batches`, preprocessed images on the host.

    Raises CorpError where an exporter cannot read the model.
    """
    files = []
    for name in options.formats:
        try:
            # Exporters warn of their own insides in some versions of torch, which advises against TorchScript, and of
            # sizes read while recording: of the image, which is fixed. The files are compared in any case.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                files += WRITERS[name](source, options, folder, batches)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            why = str(error).strip().split("\n")[0]
            raise CorpError(f"{source.spec.name} cannot be exported as {name} ({why}); try another format.") from error
    return files


def runs_of(files: list[Written]) -> dict[str, nn.Module]:
    """file and optimiser → module."""
    return {f"{file.path.name}, {name}": run for file in files for name, run in file.runs.items()}


def place(files: list[Written], parity: dict[str, Parity], folder: Path) -> list[File]:
    """Move the files to `folder`, where they were judged as in `parity` → what the report says of them."""
    found = [file.judged(parity) for file in files]
    warn_apart(found)
    for file in files:
        for part in file.parts():
            if (target := folder / part.name).is_dir():
                require_ours(target, part)
                shutil.rmtree(target)
            os.replace(part, target)
    return found


def require_ours(there: Path, new: Path) -> None:
    """Raise CorpError where the folder `there` holds files that corp would not write as `new`."""
    others = {path.relative_to(there) for path in there.rglob("*")} - {path.relative_to(new) for path in new.rglob("*")}
    if others:
        raise CorpError(f"{there} holds {min(others)}, which corp did not write; move that folder, or choose another.")


def warn_apart(files: list[File]) -> None:
    """Say so where a float32 file is not the model that was exported."""
    for file in files:
        furthest = max(found.max_abs_diff for found in file.parity.values())
        if file.dtype == "float32" and file.quantisation is None and furthest > CLOSE:
            console.warn(f"{file.file} gives other logits than PyTorch, by up to {furthest:.2g}; check the export.")
