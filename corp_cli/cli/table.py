"""The commands of corp: what each does and what it can be told. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corp_cli.config.analyze import AnalyzeConfig
from corp_cli.config.checkpoints import BenchConfig, EvaluateConfig, ExportConfig, InfoConfig
from corp_cli.config.doctor import DoctorConfig
from corp_cli.config.gate import CheckConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.config.push import PushConfig
from corp_cli.config.report import ReportConfig
from corp_cli.config.study import StudyConfig
from corp_cli.config.summary import SummaryConfig


@dataclass(frozen=True)
class Command:
    """One command; `corp_cli.commands.NAME` has its `run(cfg, folder)`, `cfg` of the schema."""

    does: str
    schema: Any
    writes_folder: bool = True


COMMANDS = {
    "prune": Command("prune a vision transformer in one shot, from a folder of unlabelled images", PruneConfig),
    "evaluate": Command("measure the accuracy of a checkpoint, and how close it is to its dense model", EvaluateConfig),
    "bench": Command("time a pruned checkpoint against its dense model on this machine", BenchConfig),
    "analyze": Command("say how redundant every block of a model is, and its attention", AnalyzeConfig),
    "export": Command(
        "write a checkpoint as ONNX, torch.export or TorchScript, and compare it with the model", ExportConfig
    ),
    "push": Command("share a checkpoint on the Hugging Face hub, with a model card", PushConfig, writes_folder=False),
    "check": Command("compare a report with a baseline, and fail where it is worse", CheckConfig, writes_folder=False),
    "summary": Command("put all runs below a folder side by side", SummaryConfig, writes_folder=False),
    "report": Command("show runs as one page, with charts", ReportConfig, writes_folder=False),
    "study": Command("draw a table or figure of the paper again, on any model", StudyConfig),
    "info": Command("describe a pruned checkpoint", InfoConfig, writes_folder=False),
    "doctor": Command(
        "look whether corp can work on this machine, and say what to do where not", DoctorConfig, writes_folder=False
    ),
}
