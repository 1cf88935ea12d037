"""Models in memory: what builds them again is read off them, and the copy puts out the same; or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from corp_cli.config.images import DataConfig
from corp_cli.errors import CorpError
from corp_cli.models.live import live_model, unwrapped
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.loading import build, skeleton
from tests.support.variants import PATHS, SMALL, VARIANTS, arguments, logits, require_same
from tests.support.variants import build as variant
from tests.support.variants import images as images_of

SAID = {"swiglu": {"mlp_layer": timm.layers.SwiGLU}, "sapiens2": {"num_kv_heads": 2}}  # what no module says of itself


def loaded(model: nn.Module, name: str | None = None, **args: Any) -> LoadedModel:
    return live_model(model, name, args, DataConfig())


def check_same(name: str) -> None:
    """The copy, and what is built anew from the arguments found, compute what the model does, which stays as it is."""
    model = variant(name).train()
    part = next(iter(model.children()))
    part.eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = loaded(model, **SAID.get(name, {}))
    assert (model.training, part.training) == (True, False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    x = images_of(name)
    model.eval()
    require_same(logits(found.model, x), logits(model, x))
    again = build(found.spec.name, found.spec.args).eval()
    again.load_state_dict(before)
    require_same(logits(again, x), logits(model, x))
    assert not found.model.training
    assert not {p.data_ptr() for p in found.model.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("name", PATHS)
def test_a_model_of_timm_is_built_again(name: str) -> None:
    check_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PATHS])
def test_every_other_variant_is_built_again(name: str) -> None:
    check_same(name)


def test_an_unchanged_model_needs_no_arguments_but_its_classes_and_size() -> None:
    found = loaded(timm.create_model("vit_tiny_patch16_224", num_classes=3))
    assert (found.spec.name, found.source) == ("vit_tiny_patch16_224", "vit_tiny_patch16_224")
    assert found.spec.args == {"num_classes": 3, "img_size": [224, 224]}
    assert found.spec.data["input_size"] == [3, 224, 224]


def test_dropout_is_what_it_was() -> None:
    rates = {"drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.3, "pos_drop_rate": 0.4}
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, **rates, drop_path_rate=0.5)
    args = loaded(model).spec.args
    assert {key: args[key] for key in rates} == rates
    assert args["drop_path_rate"] == pytest.approx(0.5)
    assert str(loaded(model).model) == str(model.eval())


def test_a_head_that_was_put_in_by_hand_is_read() -> None:
    model: Any = variant("vit")
    model.head = nn.Linear(32, 3)
    found = loaded(model)
    assert found.spec.args["num_classes"] == 3
    require_same(logits(found.model, images_of("vit")), logits(model, images_of("vit")))


def test_class_names_and_preprocessing_are_the_models_own() -> None:
    model: Any = variant("vit")
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "label_names": list("abcdefg")}
    found: Any = loaded(model)
    assert found.spec.data["mean"] == [0.1, 0.2, 0.3]
    assert found.model.pretrained_cfg["label_names"] == list("abcdefg")
    assert live_model(model, None, {}, DataConfig(mean=[0.5])).spec.data["mean"] == [0.5] * 3


def test_a_model_made_without_create_model_is_named_by_the_user() -> None:
    model = VisionTransformer(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=7).eval()
    with pytest.raises(CorpError, match=r"does not say which model of timm it is.*model\.name=NAME"):
        loaded(model)
    found = loaded(model, "vit_base_patch16_224")
    assert skeleton(found.spec).state_dict().keys() == model.state_dict().keys()
    require_same(logits(found.model, images_of("vit")), logits(model, images_of("vit")))


def other_activation() -> nn.Module:
    model: Any = variant("vit")
    model.blocks[1].mlp.act = nn.ReLU()
    return model


def other_dtypes() -> nn.Module:
    model: Any = variant("vit")
    model.head.to(torch.bfloat16)
    return model


def not_a_number() -> nn.Module:
    model: Any = variant("vit")
    nn.init.constant_(model.head.bias, float("nan"))
    return model


def broken() -> nn.Module:
    model: Any = variant("vit")
    model.register_forward_pre_hook(lambda module, args: (args[0][:, :1],))
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_activation, "puts out something else than timm's vit_tiny_patch16_224"),
        (lambda: variant("swiglu"), r"is not what timm builds as .* missing .* unexpected .*model\.args\.KEY"),
        (lambda: variant("sapiens2"), "timm cannot build the Eva as vit_base_patch16_sapiens2"),
        (other_dtypes, r"parameters in bfloat16 on cpu, float32 on cpu; .* model\.to"),
        (not_a_number, r"NaN or infinite values in head\.bias"),
        (broken, r"cannot be run on images of \[2, 3, 32, 32\]"),
        (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, device="meta"), "on meta; prune it before"),
        (lambda: timm.create_model("resnet10t"), "ResNet has no `blocks`"),
        (nn.Identity, "Identity has no parameters"),
        (lambda: nn.Linear(2, 2), "Linear has no `blocks`"),
    ],
)
def test_what_cannot_be_pruned_is_refused(make: Any, said: str) -> None:
    model = make().train()
    with pytest.raises(CorpError, match=said):
        loaded(model)
    assert all(module.training for module in model.modules())


def test_half_precision_is_read_as_float32() -> None:
    model = variant("vit").to(torch.bfloat16)
    found = loaded(model)
    assert next(found.model.parameters()).dtype == torch.float32
    expected = logits(model, images_of("vit").bfloat16()).float()
    torch.testing.assert_close(logits(found.model, images_of("vit")), expected, rtol=0.1, atol=0.1)


def test_wrappers_are_taken_off() -> None:
    model = variant("vit")
    assert unwrapped(model) is model
    assert unwrapped(nn.DataParallel(nn.DataParallel(model))) is model
    compiled: Any = torch.compile(model)
    assert unwrapped(compiled) is model


# --- transformers ---------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher", "Dinov2Model"])
def test_a_model_of_transformers_is_the_same_in_timm(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its models are what is read")
    cls = getattr(transformers, kind)
    config = cls.config_class(**SIZES, num_labels=5)
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    found, x = loaded(model.eval()), images_of("vit")
    with torch.no_grad():
        said = model(x)
        if kind == "Dinov2Model":
            require_same(found.model.forward_features(x), said.last_hidden_state)  # type: ignore[operator]
        else:
            require_same(found.model(x), said.logits)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Dinov2ForImageClassification", "dinov2 with a classifier"),
        ("CLIPVisionModel", "no part of a ViT, DeiT, DINOv2 or SigLIP model"),
    ],
)
def test_other_models_of_transformers_are_refused(kind: str, said: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its models are what is read")
    cls = getattr(transformers, kind)
    with pytest.raises(CorpError, match=said):
        loaded(cls(cls.config_class(**SIZES)))


def test_the_arguments_of_variants_are_those_they_were_built_with() -> None:
    name, args = arguments("sam")
    found = loaded(variant("sam")).spec.args
    for key in ("embed_dim", "depth", "num_heads", "window_size", "neck_chans"):
        assert found[key] == args[key], (name, key)
    assert found["global_attn_indexes"] == list(args["global_attn_indexes"])
