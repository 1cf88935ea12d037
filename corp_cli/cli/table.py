"""The commands of corp: what each does, what it can be told, and where its work is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corp_cli.config.gate import CheckConfig
from corp_cli.config.prune import BenchConfig, DoctorConfig, EvaluateConfig, ExportConfig, InfoConfig, PruneConfig


@dataclass(frozen=True)
class Command:
    """One command; the module has `run(cfg, folder)`, `cfg` of the schema. That of prune may get a cache as well."""

    does: str
    schema: Any
    module: str
    writes_folder: bool = True


COMMANDS = {
    "prune": Command(
        "prune a vision transformer in one shot, from a folder of unlabelled images",
        PruneConfig,
        "corp_cli.commands.prune",
    ),
    "evaluate": Command(
        "measure the accuracy of a checkpoint, and how close it is to its dense model",
        EvaluateConfig,
        "corp_cli.commands.evaluate",
    ),
    "bench": Command(
        "time a pruned checkpoint against its dense model on this machine",
        BenchConfig,
        "corp_cli.commands.bench",
    ),
    "export": Command(
        "write a checkpoint as ONNX, torch.export or TorchScript, and compare it with the model",
        ExportConfig,
        "corp_cli.commands.export",
    ),
    "check": Command(
        "compare a report with a baseline, and fail where it is worse",
        CheckConfig,
        "corp_cli.commands.check",
        writes_folder=False,
    ),
    "info": Command(
        "describe a pruned checkpoint",
        InfoConfig,
        "corp_cli.commands.info",
        writes_folder=False,
    ),
    "doctor": Command(
        "look whether corp can work on this machine, and say what to do where not",
        DoctorConfig,
        "corp_cli.commands.doctor",
        writes_folder=False,
    ),
}
