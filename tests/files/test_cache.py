"""Statistics kept in a file and found again, and images that are too few or broken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli import pipeline
from corp_cli.config.images import CalibrationConfig, DataConfig, EvaluationConfig
from corp_cli.config.prune import CompensationConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache import cache as cache_module
from corp_cli.files.cache.cache import Cache
from corp_cli.files.cache.keys import images_sha256, statistics_key
from corp_cli.files.cache.statistics import read_statistics
from corp_cli.images.sources import ImageSet
from corp_cli.method import calibrate as calibrate_module
from corp_cli.models.bundled import BUNDLED
from corp_cli.pipeline import prune
from tests.support.recipes import PAPER_COMPENSATION

pytestmark = pytest.mark.usefixtures("tiny_digits")


def config(tmp_path: Path, **calibration: Any) -> PruneConfig:
    """In one shot: along the stream, nothing of the dense model is measured where sizes are given."""
    return PruneConfig(
        compensation=CompensationConfig(propagate="none"),
        sparsity=SparsityConfig(joint=0.5),
        calibration=CalibrationConfig(**{"num_images": 48, "num_workers": 0, **calibration}),
        evaluation=EvaluationConfig(num_images=32, num_workers=0, throughput_batches=0),
        device="cpu",
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every pass over the calibration images."""
    made: list[int] = []
    calibrate = calibrate_module.calibrate

    def counted(*args: Any) -> Any:
        made.append(1)
        return calibrate(*args)

    monkeypatch.setattr(pipeline, "calibrate", counted)
    return made


@pytest.mark.parametrize("cache", ["kept", "new/kept.safetensors"])
def test_a_sweep_measures_once(tmp_path: Path, passes: list[int], cache: str) -> None:
    cfg = config(tmp_path, cache=str(tmp_path / cache))
    plain = prune(config(tmp_path)).model.state_dict()
    for mlp in ("gauss_newton", "mean", "gauss_newton"):
        result = prune(replace(cfg, compensation=replace(cfg.compensation, mlp=mlp)))
    assert len(passes) == 2
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-3, atol=1e-4)
    assert result.report.calibration.images == 48


def test_a_run_begins_before_its_weights_are_hashed_where_nothing_is_kept(
    tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing takes seconds of large models; a folder that holds statistics has to be asked for the right ones."""
    passed: list[int] = []

    def counted(*args: Any) -> Any:
        passed.append(len(passes))
        return statistics_key(*args)

    monkeypatch.setattr(cache_module, "WRITTEN", 1e12)  # small statistics are not kept otherwise
    monkeypatch.setattr(cache_module, "statistics_key", counted)
    for _ in range(2):
        prune(config(tmp_path), cache=Cache(own=tmp_path / "own"))
    assert len(passes) == passed[0] > 0
    assert passed == [len(passes)] * 2


@pytest.mark.parametrize("cache", ["kept", "kept.safetensors"])
def test_statistics_of_weighted_logits_serve_others_too(tmp_path: Path, passes: list[int], cache: str) -> None:
    """Not the other way round, which says why."""
    best = config(tmp_path, cache=str(tmp_path / cache))
    best = replace(best, compensation=replace(best.compensation, qk="weighted_lowrank"))
    plain = replace(best, compensation=replace(best.compensation, qk="lowrank"))
    results = [prune(cfg).model.state_dict() for cfg in (best, plain)]
    assert len(passes) == 1
    other = replace(plain, calibration=replace(plain.calibration, cache=str(tmp_path / f"other-{cache}")))
    alone = prune(other).model.state_dict()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in results[1].items())
    again = prune(replace(other, compensation=best.compensation)).report
    assert len(passes) == 3
    assert [("for other logits;" in warning) for warning in again.warnings] == [True] * cache.endswith(".safetensors")


OTHERS = {
    "weights": lambda cfg, tmp: replace(cfg, model=replace(cfg.model, checkpoint=other_weights(tmp))),
    "images": lambda cfg, tmp: replace(cfg, calibration=replace(cfg.calibration, num_images=47)),
    "transform": lambda cfg, tmp: replace(cfg, data=DataConfig(mean=[0.4])),
    "groups": lambda cfg, tmp: replace(cfg, sparsity=SparsityConfig(mlp=0.5)),
}


def test_statistics_of_more_groups_are_used(tmp_path: Path, passes: list[int]) -> None:
    cfg = config(tmp_path, cache=str(tmp_path / "kept"))
    cfg = replace(cfg, compensation=PAPER_COMPENSATION)
    both = replace(cfg, sparsity=SparsityConfig(joint=0.5, vo=0.5))
    one = replace(cfg, sparsity=SparsityConfig(mlp=0.5))
    plain = prune(replace(one, calibration=replace(cfg.calibration, cache=None))).model.state_dict()
    prune(both)
    found = prune(one).model.state_dict()
    assert len(passes) == 2
    assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())
    (file,) = (tmp_path / "kept").glob("statistics-*.safetensors")
    file.write_bytes(file.read_bytes()[:500])
    for _ in range(2):  # that of more groups is of no use, and one of its own is made
        prune(one)
    assert len(passes) == 3
    assert len(list((tmp_path / "kept").glob("statistics-*.safetensors"))) == 2


def other_weights(tmp_path: Path) -> str:
    state = load_file(BUNDLED["vit_digits"].weights)
    state["head.bias"] += 1
    save_file(state, tmp_path / "other.safetensors")
    return str(tmp_path / "other.safetensors")


@pytest.mark.parametrize("part", list(OTHERS))
def test_statistics_of_something_else_are_not_used(tmp_path: Path, passes: list[int], part: str) -> None:
    cfg = config(tmp_path, cache=str(tmp_path / "kept.safetensors"))
    prune(cfg)
    found = prune(OTHERS[part](cfg, tmp_path)).report
    assert len(passes) == 2
    why = f"{part}, logits" if part == "groups" else part  # which are weighted where queries and keys are pruned
    assert [w for w in found.warnings if f"kept.safetensors was measured for other {why}; measuring anew" in w]


@pytest.mark.parametrize("content", [b"", b"hello", "model"])
def test_a_file_that_corp_did_not_write_is_left_alone(tmp_path: Path, passes: list[int], content: bytes | str) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(BUNDLED["vit_digits"].weights.read_bytes() if isinstance(content, str) else content)
    before = path.read_bytes()
    report = prune(config(tmp_path, cache=str(path))).report
    assert path.read_bytes() == before
    assert any("is not a whole file of corp's; measuring without it" in w for w in report.warnings)


def test_a_damaged_file_in_the_folder_is_replaced(tmp_path: Path, passes: list[int]) -> None:
    cfg = config(tmp_path, cache=str(tmp_path))
    prune(cfg)
    (file,) = tmp_path.glob("statistics-*")
    file.write_bytes(file.read_bytes()[:500])
    assert any("measuring anew and replacing it" in w for w in prune(cfg).report.warnings)
    prune(cfg)
    assert len(passes) == 2
    assert read_statistics(file, torch.device("cpu")) is not None


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpError, match=r"^calibration\.cache: .* cannot be written"):
        prune(config(tmp_path, cache=str(tmp_path / "file" / "kept.safetensors")))


def test_images_are_told_apart_by_content(tmp_path: Path) -> None:
    def of(*names: str) -> str:
        return images_sha256(ImageSet("x", tuple(tmp_path / name for name in names), ("",) * len(names)))

    for name, content in (("a", b"1"), ("b", b"2"), ("copy of a", b"1")):
        (tmp_path / name).write_bytes(content)
    assert of("a", "b") == of("copy of a", "b")
    assert len({of("a", "b"), of("b", "a"), of("a"), of("a", "a"), of("a", "gone")}) == 5


def test_statistics_that_cannot_be_kept_are_a_bug(tmp_path: Path) -> None:
    from corp_cli.files.cache.statistics import Measured, write_statistics

    @dataclass(frozen=True)
    class Odd:
        values: list[int]

    with pytest.raises(TypeError, match=r"Odd\.values is a list"):
        write_statistics(Measured({}, (Odd([1]),), 1, []), tmp_path / "x.safetensors")  # type: ignore[arg-type]


# --- images that are too few, or broken -----------------------------------------------------------------------


def digits(folder: Path, good: int, bad: int) -> Path:
    generator = np.random.default_rng(0)
    for i in range(good + bad):
        Image.fromarray(generator.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{i:03}.png")
    for i in range(bad):
        (folder / f"{i:03}.png").write_bytes(b"broken")
    return folder


def test_spares_take_the_places_of_broken_images(tmp_path: Path) -> None:
    cfg = config(tmp_path, path=str(digits(tmp_path, 200, 6)), num_images=150, max_bad=0.1)
    cfg.evaluation.num_images, cfg.evaluation.max_bad = None, 0.5
    report = prune(cfg).report
    calibration, evaluation = report.calibration, report.evaluation
    assert calibration.images == 150
    assert calibration.bad.count + evaluation.bad.count <= 6
    assert calibration.bad.count > 0
    assert all("(cannot identify image file" in said for said in calibration.bad.first)
    assert any("cannot be read, first" in said for said in report.warnings)
    assert evaluation.held_out
    assert evaluation.images + evaluation.bad.count == 206 - 150 - 15  # fifteen are kept as spares


def test_a_cache_remembers_the_broken_images(tmp_path: Path, passes: list[int]) -> None:
    (tmp_path / "images").mkdir()
    images = digits(tmp_path / "images", 100, 3)
    cfg = config(tmp_path, path=str(images), num_images=103, max_bad=0.1, cache=str(tmp_path / "cache"))
    cfg.evaluation.max_bad = 1
    first, second = (prune(cfg).report.calibration for _ in range(2))
    assert len(passes) == 1
    assert first == second
    assert first.bad.count == 3


@pytest.mark.parametrize(
    ("good", "bad", "max_bad", "sentence"),
    [
        (45, 3, 0.01, r"calibration\.path=.* 3 of the first 48.*calibration\.max_bad"),
        (0, 40, 1.0, "holds no image that can be read"),
    ],
)
def test_too_many_broken_images_are_refused(tmp_path: Path, good: int, bad: int, max_bad: float, sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        prune(config(tmp_path, path=str(digits(tmp_path, good, bad)), batch_size=64, max_bad=max_bad))


def test_broken_evaluation_images_are_not_scored(tmp_path: Path) -> None:
    for name in "0", "1":
        (tmp_path / name).mkdir()
        digits(tmp_path / name, 20, 2)
    cfg = config(tmp_path)
    cfg.evaluation.path, cfg.evaluation.num_images, cfg.evaluation.max_bad = str(tmp_path), None, 0.1
    evaluation = prune(cfg).report.evaluation
    assert (evaluation.images, evaluation.labelled_images, evaluation.bad.count) == (40, 40, 4)
    cfg.evaluation.max_bad = 0.05
    with pytest.raises(CorpError, match=r"evaluation\.path=.*evaluation\.max_bad"):
        prune(cfg)


def test_too_few_tokens_say_how_many_images_are_needed(tmp_path: Path) -> None:
    cfg = config(tmp_path, num_images=3)
    warnings = prune(cfg).report.warnings
    asked = "3 calibration images give 51 tokens for the 64 channels of mlp in blocks.0; at least 4 images are needed"
    assert any(asked in said for said in warnings)
    with pytest.raises(CorpError, match="at least 4 images are needed"):
        prune(replace(cfg, compensation=CompensationConfig(ridge_lambda=0)))
    assert not any(
        "tokens" in said for said in prune(replace(cfg, compensation=CompensationConfig(mlp="mean"))).report.warnings
    )


def test_activations_that_are_not_finite_name_the_block(tmp_path: Path) -> None:
    state = load_file(BUNDLED["vit_digits"].weights)
    state["blocks.1.mlp.fc1.weight"] *= 1e30
    state["blocks.1.mlp.fc1.bias"] += 1e38
    save_file(state, tmp_path / "wild.safetensors")
    cfg = config(tmp_path)
    cfg.model.checkpoint = str(tmp_path / "wild.safetensors")
    with pytest.raises(CorpError, match=r"Activations of blocks\.1 are NaN or infinite"):
        prune(cfg)


# --- preprocessing --------------------------------------------------------------------------------------------


def test_preprocessing_is_overridden_printed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from corp_cli.files.manifest import read_manifest

    data = DataConfig(interpolation="bilinear", crop_pct=0.5, mean=[0.25], std=[0.75], crop_mode="squash")
    report = prune(replace(config(tmp_path), data=data), tmp_path).report
    expected = {
        "input_size": [1, 8, 8],
        "interpolation": "bilinear",
        "mean": [0.25],
        "std": [0.75],
        "crop_pct": 0.5,
        "crop_mode": "squash",
    }
    assert vars(report.model.data) == expected
    assert read_manifest(tmp_path / "pruned.safetensors").model.data == expected
    assert "8x8, 1 channel, bilinear, crop_pct 0.5 (squash), mean 0.25, std 0.75" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (DataConfig(mean=[0.1, 0.2]), r"data\.mean has 2 values and the model 1 channels"),
        (DataConfig(input_size=16), r"data\.input_size=\[16,16\].*takes \[8, 8\].*'\+model\.args\.img_size=\[16,16\]'"),
    ],
)
def test_preprocessing_that_does_not_suit_the_model_is_refused(tmp_path: Path, data: DataConfig, sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        prune(replace(config(tmp_path), data=data))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"input_size": "big"}, r"data\.input_size=big is not a size"),
        ({"input_size": [3, 8, 8]}, "is not a size"),
        ({"input_size": 0}, "is not a size"),
        ({"interpolation": "cubic"}, r"data\.interpolation=cubic is not a choice"),
        ({"crop_mode": "middle"}, r"data\.crop_mode=middle is not a choice"),
        ({"crop_pct": 1.5}, r"data\.crop_pct=1.5 is out of range"),
        ({"mean": [123.675, 116.28, 103.53]}, r"data\.mean=.* give values in \[0, 1\]"),
        ({"mean": []}, r"data\.mean=\[\]"),
        ({"std": [0.5, 0.0]}, r"data\.std=.* above 0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        DataConfig(**values)


@pytest.mark.parametrize("key", ["calibration", "evaluation"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_max_bad_is_a_fraction(key: str, value: float) -> None:
    kind = CalibrationConfig if key == "calibration" else EvaluationConfig
    with pytest.raises(CorpError, match=rf"{key}\.max_bad={value} is out of range"):
        kind(max_bad=value)
