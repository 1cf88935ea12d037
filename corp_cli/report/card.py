"""The model card of a pruned checkpoint: what its manifest and its report say, for readers on the Hugging Face hub.

A card names no folder of this machine, and no figure that does not stand in one of the two. Imports no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath, PureWindowsPath
from string import Template
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.output import REPORT
from corp_cli.models.blocks import GROUPS
from corp_cli.models.spec import Counts, Manifest, PrunedSizes
from corp_cli.report.gate_input import at, measured, number

TAGS = ("timm", "corp", "pruning", "vision-transformer")
MODELS = ("dense", "uncompensated", "pruned")
ROWS = (  # label, key in the report, form, whether it is to the dense model
    ("top-1", "top1", "{:.2f}%", False),
    ("top-5", "top5", "{:.2f}%", False),
    ("k-NN top-1", "knn_top1", "{:.2f}%", False),
    ("same class as the dense model", "agreement", "{:.2f}%", True),
    ("KL from the dense model, nats", "kl", "{:.3g}", True),
    ("cosine of features to the dense model's", "cosine", "{:.4f}", True),
    ("CKA of features with the dense model's", "cka", "{:.4f}", True),
)
TEXT = Template(
    """\
# $title

`$timm_name` of [timm](https://github.com/huggingface/pytorch-image-models) with $removed removed by CORP,
a one-shot method: no training, no labels, no gradients. What was cut is made up for by solving linear equations.
$origin

## Size

$size

## What was cut

Units kept of those of the dense model, per block:

$cuts

$method

## Accuracy and fidelity

$results

## Use

The layers have sizes that timm has no arguments for, so that the package `corp-cli` builds the model; the weights are
safetensors, and no code comes with them.

```python
import timm
from corp_cli import load_pruned, register

model = load_pruned("hf-hub:$repository")  # an nn.Module of timm's class, in eval mode
register()  # or by timm, from now on
model = timm.create_model("hf-hub:$repository", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))  # how images are prepared
```

`corp evaluate checkpoint=hf-hub:$repository evaluation.path=FOLDER` measures it on other images, and
`corp export checkpoint=hf-hub:$repository` makes an ONNX file of it, which needs neither package.

## Limits

$limits

## Licence

$licence

## Citation

```bibtex
@misc{zhang2026corp,
  title  = {{CORP}: Closed-Form One-Shot Representation-Preserving Structured Pruning for Vision Transformers},
  author = {Zhang, Boxiang and Yang, Baijian},
  year   = {2026},
  note   = {Purdue University}
}
```

Made by $versions. Dense weights: sha256 `$sha`.
"""
)


@dataclass(frozen=True)
class Facts:
    """What a card says besides what the checkpoint says of itself."""

    repository: str
    report: dict[str, Any] | None  # of the run that wrote the checkpoint
    base_model: str | None
    license: str | None
    license_by: str = ""  # who names it


def read_report(path: Path, manifest: Manifest, counts: Counts) -> dict[str, Any]:
    """The report in the file `path`. Raises CorpError where it is none, or not of the checkpoint with `manifest`."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CorpError(f"{path} cannot be read ({error.strerror}); put it right, or move it away.") from error
    except (ValueError, RecursionError) as error:
        raise CorpError(f"{path} is not whole JSON ({error}); copy it again, or move it away.") from error
    found = measured(content, str(path))
    figures = {"macs": counts.pruned.macs, "params": counts.pruned.parameters}
    same = found.kind == REPORT and found.same["weights"] == manifest.dense_sha256
    if not same or any(found.figures[key] != value for key, value in figures.items()):
        raise CorpError(f"{path} is the report of another checkpoint; put the right one there, or move it away.")
    return dict(content)


def model_card(facts: Facts, manifest: Manifest, counts: Counts) -> str:
    """README.md of a repository: metadata for the hub, and the text."""
    from huggingface_hub import ModelCard, ModelCardData

    classifies = int(manifest.model.args.get("num_classes", 0)) > 0
    name = facts.repository.rpartition("/")[2]
    data = ModelCardData(
        base_model=facts.base_model,
        eval_results=eval_results(facts.report) or None,
        library_name="timm",
        license=facts.license or "unknown",
        model_name=name,
        pipeline_tag="image-classification" if classifies else "image-feature-extraction",
        tags=list(TAGS),
    )
    text = TEXT.substitute(
        title=name,
        repository=facts.repository,
        timm_name=manifest.model.name,
        removed=f"{gone(counts, 'parameters')} of its parameters and {gone(counts, 'macs')} of its MACs",
        origin=origin_line(facts),
        size=size_table(counts),
        cuts=cuts_table(manifest, counts),
        method=method_lines(manifest, facts.report),
        results=results_text(facts.report),
        limits="\n".join(f"- {line}" for line in limits(manifest)),
        licence=licence_line(facts),
        versions=", ".join(f"{package} {version}" for package, version in manifest.versions.items()) or "corp",
        sha=manifest.dense_sha256,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def eval_results(report: dict[str, Any] | None) -> list[Any]:
    """The accuracies that were measured, as the hub keeps them."""
    from huggingface_hub import EvalResult

    found = []
    for label, key in (("top-1 accuracy, %", "top1"), ("top-5 accuracy, %", "top5")):
        value = number(report, f"evaluation.pruned.{key}", REPORT)
        if value is not None:
            images = place(at(report, "evaluation.source"))
            what: Any = {"task_type": "image-classification", "dataset_type": "custom", "dataset_name": images}
            found.append(EvalResult(metric_type="accuracy", metric_name=label, metric_value=value, **what))
    return found


def gone(counts: Counts, what: str) -> str:
    """The share that was removed."""
    dense, pruned = (getattr(one, what) for one in (counts.dense, counts.pruned))
    return f"{100 * (1 - pruned / dense):.1f}%"


def size_table(counts: Counts) -> str:
    """Parameters and MACs, before and after."""
    rows = [["", "dense", "pruned", "removed"]]
    for label, what in (("parameters", "parameters"), ("MACs of one image", "macs")):
        cells = [f"{getattr(one, what):,}" for one in (counts.dense, counts.pruned)]
        rows.append([label, *cells, gone(counts, what)])
    return table(rows)


def cuts_table(manifest: Manifest, counts: Counts) -> str:
    """Kept of dense units by group; a row for every run of blocks that are alike."""
    names = sorted(counts.blocks, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
    merges = any(sizes.merge for sizes in manifest.blocks.values())

    def cells(name: str) -> tuple[str, ...]:
        dense, sizes = asdict(counts.blocks[name]), manifest.blocks.get(name, PrunedSizes())
        kept = {**dense, **sizes.units()}
        found = [
            f"{kept[group]} of {dense[group]}" if kept[group] != dense[group] else f"{dense[group]}" for group in GROUPS
        ]
        return (*found, f"{sizes.merge or 0}") if merges else tuple(found)

    rows = [["blocks", *GROUPS, *(["tokens merged"] if merges else [])]]
    for alike, group in groupby(names, cells):
        first, *more = group
        rows.append([f"{first} to {more[-1]}" if more else first, *alike])
    return table(rows)


def method_lines(manifest: Manifest, report: dict[str, Any] | None) -> str:
    """Which of corp's methods, on which images."""
    recipe = manifest.recipe
    lines = [f"Recipe `{code(recipe.get('recipe', 'unknown'))}`, seed {code(recipe.get('seed', 'unknown'))}."]
    asked = recipe.get("sparsity")
    if isinstance(asked, dict):
        given = {key: value for key, value in asked.items() if isinstance(value, float) and value > 0}
        lines.append("Asked for: " + ", ".join(f"`{code(key)}={value:g}`" for key, value in given.items()) + ".")
    if report is not None:
        count, images = at(report, "calibration.images"), place(at(report, "calibration.source"))
        lines.append(f"Calibrated on {code(count)} unlabelled images of `{images}`.")
    lines.append("`mlp`: hidden channels; `qk`, `vo`: dimensions of queries and keys, of values, of every head.")
    return " ".join(lines)


def results_text(report: dict[str, Any] | None) -> str:
    """What was measured of the three models, and on which images."""
    if report is None:
        return "Not measured here: no `report.json` came with the checkpoint."
    rows = [["", "dense", "cut, not repaired", "pruned"]]
    for label, key, form, to_dense in ROWS:
        values = [number(report, f"evaluation.{model}.{key}", REPORT) for model in MODELS]
        if values[-1] is not None:
            shown = [
                "" if value is None or (to_dense and i == 0) else form.format(value) for i, value in enumerate(values)
            ]
            rows.append([label, *shown])
    seen = at(report, "evaluation") or {}
    held_out = "none of which was" if seen.get("held_out") else "some of which were"
    labelled = seen.get("labelled_images") or 0
    on = f"On {code(seen.get('images'))} images of `{place(seen.get('source'))}`, {held_out} calibrated on; "
    return f"{table(rows)}\n\n{on}{f'{code(labelled)} have labels' if labelled else 'they have no labels'}."


def limits(manifest: Manifest) -> list[str]:
    """What a user should know before using it."""
    sizes = manifest.blocks.values()
    lines = [
        "Fewer MACs are not always faster: it depends on hardware, batch size and kernels.",
        "The repair is fitted to the calibration images; other images may lose more.",
        "What the dense model is not meant for, this one is not either.",
    ]
    if any(one.tokens is not None for one in sizes):
        lines.append("The last block updates only the tokens that the head reads; the others have no features of it.")
    if any(one.merge for one in sizes):
        lines.append("Similar tokens are merged on the way, so that there are no features by place.")
    return lines


def origin_line(facts: Facts) -> str:
    """Which model it was made from."""
    if facts.base_model is None:
        return "Which dense weights it was made from, their hash at the end says."
    return f"The dense weights are those of [{facts.base_model}](https://huggingface.co/{facts.base_model})."


def licence_line(facts: Facts) -> str:
    """That of the dense weights, which holds for what is made of them."""
    if facts.license is None:
        return "Unknown. Pruned weights keep the licence of the dense ones: look it up before you use them."
    by = f", says {facts.license_by}" if facts.license_by else ""
    return f"`{code(facts.license)}`: that of the dense weights{by}, which pruned weights keep."


def place(source: Any) -> str:
    """What images are called, without the folders of this machine."""
    text = str(source)
    for kind in (PurePosixPath, PureWindowsPath):
        text = kind(text).name if kind(text).is_absolute() else text
    return code(text)


def code(value: Any) -> str:
    """`value` for a code span in a table."""
    return re.sub(r"[`|<>\s]+", " ", str(value)).strip()


def table(rows: list[list[str]]) -> str:
    """In Markdown; the first row is the heading, and numbers stand to the right."""
    head, *body = rows
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *body))
