"""Which class every image shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from corp_cli.config.images import EvaluationConfig
from corp_cli.errors import CorpError
from corp_cli.images.labels import Head, Labelled, make_head, near_chance, read_class_map, with_label_file, with_labels
from corp_cli.images.sources import ImageSet
from corp_cli.models.preprocess import wordnet_classes
from corp_cli.prepare.images import asked_images, head_of, labelled

HEADS = {1000: make_head(1000, wordnet_classes(1000), [])}


def head(num_classes: int, *names: str) -> Head:
    return make_head(num_classes, wordnet_classes(num_classes), [(name,) for name in names])


@pytest.fixture(scope="module")
def imagenet() -> Head:
    return head_of(timm.create_model("vit_tiny_patch16_224", depth=1))


def image_set(*folders: str, **more: Any) -> ImageSet:
    return ImageSet("test", tuple(Path(f"{name}/{i}.png") for i, name in enumerate(folders)), folders, **more)


# --- folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (("n02102040", "train/n01440764", "n02102040"), (217, 0, 217)),
        (("train/n01440764/images", "n01440764"), (0, 0)),
        (("0", "999", "7"), (0, 999, 7)),
        (("tench", "Tiger_Cat", "great-white shark", "tench, Tinca tinca"), (0, 282, 2, 0)),
        (("tench", "goldfish", "odds and ends"), (0, 1, -1)),
        (("crane", "photos"), None),  # a bird and a machine: of two classes
        (("1000", "7"), None),
        (("holiday", "work", "tench"), None),
        ((".", "."), None),
    ],
)
def test_folders_name_imagenet_classes(imagenet: Head, folders: tuple[str, ...], labels: Any) -> None:
    assert with_labels(image_set(*folders), imagenet).images.labels == labels


@pytest.mark.parametrize("num_classes", [1000, 11221, 11821, 21841, 21842, 21843])
def test_every_imagenet_head_knows_its_wordnet_ids(num_classes: int) -> None:
    found = with_labels(image_set("n01443537", "n02102040"), head(num_classes)).images.labels
    assert found == tuple(wordnet_classes(num_classes)[name] for name in ("n01443537", "n02102040"))


@pytest.mark.parametrize(
    ("folders", "num_classes", "labels"),
    [
        (("cat", "ant", "bee"), 3, (2, 0, 1)),
        (("10", "9", "8"), 3, (2, 1, 0)),  # in natural order, as timm sorts
        (("cat", "ant"), 3, None),
        (("cat",), 1, None),
    ],
)
def test_as_many_folders_as_classes_are_the_classes_in_order(
    folders: tuple[str, ...], num_classes: int, labels: Any
) -> None:
    assert with_labels(image_set(*folders), head(num_classes)).images.labels == labels


def test_a_datasets_own_order_and_labels_win() -> None:
    assert with_labels(image_set("b", "a", classes=("b", "a")), head(2)).images.labels == (0, 1)
    assert with_labels(image_set("x", labels=(5,)), head(3)).images.labels == (5,)


def test_folders_are_classes_of_their_own_where_the_model_has_none() -> None:
    assert with_labels(image_set("cat", "", "ant", "cat"), head(0)).images.labels == (1, -1, 0, 1)
    assert with_labels(image_set("cat", "cat"), head(0)).images.labels is None
    assert with_labels(image_set("a", "b", labels=(5, 0)), head(0)).images.labels == (5, 0)
    with pytest.raises(CorpError, match=r"evaluation\.class_map needs a classifier"):
        labelled(image_set("0"), EvaluationConfig(class_map="x"), head(0))


def test_classes_that_the_head_lacks_are_said_aloud() -> None:
    found = with_labels(image_set("n01440764", "n00004475", "n00004475"), head(1000))
    assert found.images.labels == (0, -1, -1)
    assert "1 of the 2 folders of test (n00004475) name no class of the model; their 2 images" in found.warnings[0]
    found = with_labels(image_set("n00004475"), head(1000))
    assert "None of the 1 folders of test (n00004475) names a class" in found.warnings[0]
    assert with_labels(image_set("holiday"), head(1000)) == Labelled(image_set("holiday"))


def test_labels_do_not_depend_on_how_many_images_are_asked_for(tmp_path: Path) -> None:
    from PIL import Image

    for name in "abc":
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    found = asked_images(EvaluationConfig(num_images=1), str(tmp_path), head(3), seed=0)
    assert found.labels == ("abc".index(found.folders[0]),)


# --- class maps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.txt", "ant\nbee\n\ncat\n"),
        ("map.csv", "name,index\nant,0\nbee,1\ncat,2\n"),
        ("map.csv", "bee,1\nant,0\ncat,2\n"),
        ("map.json", '{"ant": 0, "bee": 1, "cat": 2}'),
        ("map.json", '["ant", "bee", "cat"]'),
        ("map.json", '{"ant": "class a", "bee": "Class_B", "cat": 2}'),
    ],
)
def test_class_maps_map_folders(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    found = read_class_map(str(tmp_path / name), head(3, "class a", "class b", "class c"))
    assert found == {"ant": 0, "bee": 1, "cat": 2}
    images = with_labels(image_set("cat", "x/Bee", "dog"), head(3), found).images
    assert images.labels == (2, 1, -1)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("map.txt", "", "names no classes"),
        ("map.csv", "ant,0\nbee,3\n", "maps bee to '3', which is no class of the model; give an index from 0 to 2"),
        ("map.csv", "ant,0\nbee\n", "maps bee to ''"),
        ("map.json", "{", "not valid JSON"),
        ("map.json", "3", "holds a int"),
        ("map.txt", None, "cannot be read"),
    ],
)
def test_broken_class_maps_are_refused(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CorpError, match=rf"^evaluation\.class_map=[^\n]*{sentence}"):
        read_class_map(str(tmp_path / name), head(3))


# --- files of labels ------------------------------------------------------------------------------------------

VAL = ImageSet("val", (Path("val/b.jpg"), Path("val/a.jpg"), Path("val/sub/c.jpg")), (".", ".", "sub"))


@pytest.mark.parametrize(
    ("name", "content", "labels"),
    [
        ("l.txt", "a.jpg 0\nb.jpg 1\nc 2\n", (1, 0, 2)),
        ("l.txt", "a.jpg\t0\nb.jpg\t1\n", (1, 0, -1)),
        ("l.csv", "a.jpg,n01440764\nb.jpg,1\nsub/c.jpg,2\n", (1, 0, 2)),
        ("l.json", '{"a.jpg": 0, "b.jpg": [1, 5], "c.jpg": []}', ((1, 5), (0, -1), (-1, -1))),
        ("l.txt", "0\n1\n2\n", (1, 0, 2)),  # in the order of the names
        ("l.txt", "1\n1000\n2\n", (999, 0, 1)),  # can only be counted from 1
        ("l.json", "[[0], [], [2, 3]]", ((-1, -1), (0, -1), (2, 3))),
    ],
)
def test_files_of_labels(tmp_path: Path, name: str, content: str, labels: Any) -> None:
    (tmp_path / name).write_text(content)
    assert with_label_file(VAL, str(tmp_path / name), head(1000)).images.labels == labels


def test_real_labels_go_by_the_number_of_the_validation_image(tmp_path: Path) -> None:
    real = [[] if i % 2 else [i % 1000] for i in range(50_000)]
    (tmp_path / "real.json").write_text(json.dumps(real))
    names = ("ILSVRC2012_val_00000009.JPEG", "ILSVRC2012_val_00050000.JPEG", "ILSVRC2012_val_00001235.JPEG")
    images = ImageSet("val", tuple(Path(name) for name in names), (".",) * 3)
    found = with_label_file(images, str(tmp_path / "real.json"), head(1000))
    assert found.images.labels == (8, -1, 234)
    assert "no class to 1 of 3 images; they are not scored" in found.warnings[0]


def test_labels_go_through_the_class_map(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("1\n2\n1\n")
    assert with_label_file(VAL, str(tmp_path / "l.txt"), head(1000), {"1": 7, "2": 8}).images.labels == (8, 7, 7)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("l.txt", "", "is empty"),
        ("l.txt", "1\n2\n", "holds 2 labels for 3 images"),
        ("l.txt", "x.jpg 1\ny.jpg 2\n", "names none of the images in val"),
        ("l.txt", "a.jpg 1000\nb.jpg 3\n", "1 labels that are no class of the model, first '1000'"),
        ("l.json", "[1, 2", "not valid JSON"),
        ("l.json", '"x"', "holds a str"),
        ("l.txt", None, "cannot be read"),
    ],
)
def test_broken_files_of_labels_are_refused(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CorpError, match=rf"^evaluation\.labels=[^\n]*{sentence}"):
        with_label_file(VAL, str(tmp_path / name), head(1000))


# --- a mapping that cannot be right ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top1", "images", "num_classes", "warned"),
    [
        (0.0, 100, 1000, True),
        (0.2, 1000, 1000, True),
        (5.0, 1000, 1000, False),
        (10.0, 200, 10, True),
        (40.0, 200, 10, False),
        (0.0, 5, 1000, False),  # too few to tell
    ],
)
def test_accuracy_near_chance_is_doubted(top1: float, images: int, num_classes: int, warned: bool) -> None:
    assert (near_chance(top1, images, num_classes) is not None) == warned


@given(st.integers(10, 5000), st.integers(1, 1000), st.data())
def test_what_guessing_gives_is_what_it_gives_in_999_of_1000(images: int, classes: int, data: st.DataObject) -> None:
    most = int(binom.ppf(0.999, images, 1 / classes))
    hits = min(images, max(0, most + data.draw(st.integers(-3, 3))))
    assert (near_chance(100 * hits / images, images, classes) is not None) == (hits <= most)
