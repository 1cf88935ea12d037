"""report.html as text: who is on the front, what every kind of run shows, and that nothing in it is run but ours."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corp_cli.errors import CorpError
from corp_cli.report.page import page as pages
from corp_cli.report.page.charts import MEASURES, details, front, measures, short_names
from corp_cli.report.page.compared import nearest, told_apart
from corp_cli.report.page.page import page, source_hash
from corp_cli.report.read import report_of
from corp_cli.report.schema import Report
from tests.support.reports import KINDS, report

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\ud800"


class Reader(HTMLParser):
    """The elements of a page, and its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not [name for name in found if name.startswith("on")]
        assert not {"src", "href"} & found.keys() or found.get("href") == "data:,"
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"]:
            self.scripts[-1] += data


def of(**how: Any) -> Report:
    return report_of(report(**how), "r")


def test_only_our_two_scripts_may_run() -> None:
    found = Reader(page([of()]))
    data, library, own = (script.strip("\n") for script in found.scripts)
    assert json.loads(data)["names"] == [""]
    allowed = re.findall(r"'sha256-[^']+'", found.policy)
    assert allowed == [source_hash(library), source_hash(own)]
    assert found.policy.startswith("default-src 'none'")


def test_what_comes_from_a_report_is_text() -> None:
    content = report(track=EVIL)
    content["model"]["name"] = content["environment"] = content["calibration"]["source"] = EVIL
    content["environment"] = {"versions": {EVIL: EVIL}, "device_name": EVIL}
    content["stage_seconds"] = {EVIL: 1.0}
    content["warnings"] = [EVIL]
    for block in content["blocks"]:
        block["name"] = f"{EVIL}{block['name']}"
    for curve in content["sparsity"]["curves"]:
        curve["block"] = f"{EVIL}{curve['block']}"
    evil = report_of(content, "r")
    plain = Reader(page([of(), of()], ["k"], [["x", "a"], ["y", "b"]]))
    found = Reader(html := page([evil, evil], [EVIL], [["x", EVIL], [EVIL, "b"]]))
    html.encode("utf-8")
    assert found.tags.count("script") == len(found.scripts) == 3
    assert "img" not in found.tags
    assert {*found.tags} == {*plain.tags}
    assert json.loads(found.scripts[0])["names"][0] == EVIL


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_a_page(kind: str) -> None:
    html = page([of(kind=kind)])
    assert ("no labels" in html) == (kind in ("unlabelled", "features"))
    assert ("The sizes were asked for" in html) == (kind not in ("budget", "merging"))
    assert ("Merged tokens" in html) == (kind in ("budget", "merging"))  # the first by its curve alone
    assert ("1 image could not be read" in html) == (kind != "bare")
    for word in ("None", "nan", "Undefined"):
        assert not re.search(rf">[^<]*\b{word}\b", html.partition("<script")[0])
    both = page([of(kind=kind), of(kind="budget", macs=5_000_000)], ["sparsity.macs"], [["0.4", "a"], ["0.5", "b"]])
    assert both.count("<article") == 2


def test_a_page_of_a_sweep_is_small() -> None:
    """12 runs of 12 blocks, with curves."""
    many = [of(macs=macs, blocks=12) for macs in range(1_000_000, 13_000_000, 1_000_000)]
    words = [[str(i), f"run {i}"] for i in range(12)]
    assert len(page(many, ["seed"], words).encode()) < 2e6


def test_of_many_runs_those_on_the_front_are_shown_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DETAILED", 2)
    runs = [of(macs=7_000_000, top1=80), of(macs=6_000_000, top1=80), of(macs=8_000_000, top1=90)]
    html = page(runs, [], [["a"], ["b"], ["c"]])
    assert re.findall(r'<article data-run="(\d)"', html) == ["1", "2"]
    assert "2 of 3 runs can be shown" in html


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.booleans())
def test_the_front_is_what_no_other_run_beats(points: list[tuple[int, int]], lower: bool) -> None:
    measure = next(one for one in MEASURES if one.key == ("kl" if lower else "top1"))
    runs = [of(kind="bare", macs=macs, top1=float(90 + top1)) for macs, top1 in points]
    costs = [(macs, -top1) for macs, top1 in points]  # kl falls as top1 rises

    def beaten(one: tuple[int, int]) -> bool:
        return any(other[0] <= one[0] and other[1] <= one[1] and other != one for other in costs)

    found = [costs[i] for i in front(runs, measure)]
    assert found == sorted({one for one in costs if not beaten(one)})


def test_runs_are_compared_by_what_all_of_them_have() -> None:
    assert [one.key for one in measures([of(), of(kind="unlabelled")])] == ["agreement", "kl", "top1"]
    assert [one.key for one in measures([of(kind="features")])] == ["cosine", "cka"]
    kl = next(one for one in MEASURES if one.key == "kl")
    assert front([of(kind="unlabelled", macs=5), of(kind="features", macs=4)], kl) == [0]


def test_the_nearest_has_the_fewest_macs_of_those_within_a_point() -> None:
    agreement = next(one for one in MEASURES if one.key == "agreement")
    runs = [of(macs=8, top1=99.5), of(macs=7, top1=99.0), of(macs=6, top1=98.9)]
    assert nearest(runs, agreement) == 1
    assert nearest(runs[2:], agreement) is None


def test_names_of_blocks_are_their_numbers_where_these_differ() -> None:
    content = report(blocks=2)
    for names, short in (
        (["blocks.0", "blocks.1"], ["0", "1"]),
        (["layers.0.blocks.1", "layers.1.blocks.0"], ["0.1", "1.0"]),
        (["first", "second"], ["first", "second"]),
        (["a.0", "b.0"], ["a.0", "b.0"]),
    ):
        for block, name in zip(content["blocks"], names, strict=True):
            block["name"] = name
        assert list(short_names(report_of(content, "r")).values()) == short


def test_what_the_charts_draw() -> None:
    drawn = details(of(kind="merging"))
    assert drawn["blocks"] == ["0", "1", "2"]
    assert [(one["group"], one["kept"], one["gone"]) for one in drawn["sizes"]] == [
        ("mlp", [32] * 3, [32] * 3),
        ("qk", [8] * 3, [8] * 3),
        ("tokens", [0, 2, 0], None),
    ]
    assert drawn["errors"][1]["after"] == [None, 0.0, 0.0]
    mlp, _, tokens = drawn["curves"]
    assert mlp["lines"][0]["points"][:2] == [[0, 0.1], [50, 0.01]]
    assert mlp["lines"][0]["chosen"] == [50, 0.01]
    assert tokens["lines"][1]["said"] == "15 of 17"


def test_columns_that_tell_the_same_runs_apart_are_one() -> None:
    keys = ["sparsity.macs", "ranker.mlp", "recipe", "seed"]
    words = [["0.4", "obs", "best", "0"], ["0.5", "obs", "best", "0"], ["0.4", "random", "paper", "0"]]
    assert told_apart(keys, words) == (["sparsity.macs", "recipe", "seed"], [[w[0], w[2], w[3]] for w in words])


def test_the_library_is_the_one_that_its_readme_names() -> None:
    folder = Path(pages.HERE, "chartjs")
    digest = hashlib.sha256((folder / "chart.umd.min.js").read_bytes()).hexdigest()
    readme = (folder / "README.md").read_text()
    assert digest in readme
    assert f"Chart.js v{re.findall(r'# Chart.js ([0-9.]+)', readme)[0]}" in (folder / "chart.umd.min.js").read_text()
    assert "The MIT License" in (folder / "LICENSE.md").read_text()


def changed(path: list[Any], to: Any) -> Any:
    content = report()
    *way, last = path
    part = content
    for key in way:
        part = part[key]
    part[last] = to
    return content


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (["blocks"], 5),
        (["blocks", 0], []),
        (["blocks", 0, "pruned", "mlp"], "many"),
        (["blocks", 0, "pruned", "mlp"], True),
        (["stage_seconds", "load"], float("nan")),
        (["stage_seconds", "load"], float("inf")),
        (["stage_seconds", "load"], 10**400),
        (["warnings"], [{}]),
        (["evaluation", "pruned", "top1_interval"], "x"),
        (["size", "dense", "macs"], 0),
        (["size", "pruned", "parameters"], None),
    ],
)
def test_what_corp_did_not_write_is_refused(path: list[Any], to: Any) -> None:
    with pytest.raises(CorpError, match=r"^here (has|lacks)"):
        report_of(changed(path, to), "here")
