"""The whole zoo: every variant passes every contract that the quick tests hold one of each kind to."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest

from tests.export import test_export as export
from tests.export import test_timm_use as timm_use
from tests.method import test_sequential as sequential
from tests.models import test_adapter as adapter
from tests.support.variants import PATHS, VARIANTS

pytestmark = pytest.mark.slow

CONTRACTS: list[Callable[..., None]] = [
    adapter.test_blocks_have_the_sizes_and_refusals_of_the_model,
    adapter.test_weights_written_back_leave_the_model_as_it_was,
    adapter.test_units_that_contribute_nothing_are_cut_without_a_trace,
    adapter.test_pruned_models_run_train_and_come_back,
    sequential.test_streams_lead_from_images_to_the_logits_of_the_model,
    sequential.test_nothing_cut_is_the_dense_model,
    sequential.test_every_variant_is_cut_and_repaired,
    sequential.test_a_model_that_keeps_its_mlp_comes_back,
    timm_use.test_features_come_out_of_a_pruned_model,
    timm_use.test_a_new_head_can_be_trained,
]


def pass_contract(contract: Callable[..., None], variant: str, folder: Path) -> None:
    """Run a test of another file on `variant`."""
    contract(variant, *[folder] * ("tmp_path" in signature(contract).parameters))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in PATHS])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract(contract: Callable[..., None], variant: str, tmp_path: Path) -> None:
    pass_contract(contract, variant, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_torchscript(variant: str, tmp_path: Path) -> None:
    pass_contract(export.test_architectures_as_torchscript, variant, tmp_path)


@pytest.mark.parametrize("variant", ["deit3_layer_scale", "dinov2_registers"])
def test_onnx(variant: str, tmp_path: Path) -> None:
    pass_contract(export.test_architectures_as_onnx, variant, tmp_path)
