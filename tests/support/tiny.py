"""The digits in small models: a whole run takes a tenth of what the bundled one takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from corp_cli.models.bundled import BUNDLED, BundledModel

DIGITS = BUNDLED["vit_digits"]
NARROW = {**DIGITS.args, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
SHALLOW = {**DIGITS.args, "depth": 2}


def write_tiny(path: Path) -> BundledModel:
    """Two narrow random blocks: 7 of 10 digits are right."""
    torch.manual_seed(0)
    model = timm.create_model(DIGITS.timm_name, **NARROW).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fit_head(model)
    save_file(model.state_dict(), path)
    return replace(DIGITS, args=NARROW, weights=path)


def write_shallow(path: Path) -> BundledModel:
    """The first two blocks of the bundled model, for tests of rounding: 9 of 10 digits are right, by a margin."""
    model = timm.create_model(DIGITS.timm_name, **SHALLOW).eval()
    model.load_state_dict(load_file(DIGITS.weights), strict=False)
    fit_head(model)
    save_file(model.state_dict(), path)
    return replace(DIGITS, args=SHALLOW, weights=path)


@torch.no_grad()
def fit_head(model: Any) -> None:
    """A head that reads the class token, fitted by least squares on the digits for calibration."""
    digits = load_file(DIGITS.calibration)
    pixels: Tensor = (digits["images"][:, None].float() / 255 - 0.5) / 0.5
    read = F.pad(model.forward_head(model.forward_features(pixels), pre_logits=True), (0, 1), value=1.0)
    wanted = 5 * F.one_hot(digits["labels"].long(), 10).float()
    fitted = torch.linalg.lstsq(read, wanted).solution
    model.head.weight.copy_(fitted[:-1].T)
    model.head.bias.copy_(fitted[-1])
