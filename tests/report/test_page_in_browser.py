"""report.html in a real browser, at the width of a phone and of a desk, in light and in dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corp_cli.report.page.page import page
from corp_cli.report.read import report_of
from tests.support.reports import KINDS, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, to open pages in a browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
]
LOCAL = ("file:", "data:")
DRAWN = "[...document.querySelectorAll('canvas')].every((one) => !one.offsetParent || Chart.getChart(one))"
CONTRAST = """() => {  // the least of any text that is shown, as WCAG counts it
    const parts = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (text) => parts(text).slice(0, 3).map((value) => value / 255)
        .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (node) => {
        for (let one = node; one; one = one.parentElement) {
            const found = getComputedStyle(one).backgroundColor;
            if ((parts(found)[3] ?? 1) === 1) return found;
        }
    };
    return Math.min(...[...document.querySelectorAll("h1, h2, p, dt, dd, th, td, li, summary")]
        .filter((node) => node.offsetParent && node.textContent.trim()).map((node) => {
            const both = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
            return (both[0] + 0.05) / (both[1] + 0.05);
        }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as found:
        running = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of every kind of run, one of several, and one with names that mean harm."""
    folder = tmp_path_factory.mktemp("pages")
    for kind in KINDS:
        (folder / f"{kind}.html").write_text(page([report_of(report(kind), "r")]), "utf-8")
    runs = [
        report_of(report(macs=macs, top1=top1, blocks=12), "r")
        for macs, top1 in ((9_000_000, 89.5), (7_000_000, 88), (8_000_000, 87), (3_000_000, 70))
    ]
    name = "a/long name of a folder, much longer than a phone is wide/"
    words = [["10", "b", f"{name}0"], ["9", "a", f"{name}1"], ["", "c", f"{name}2"], ["100", "b", f"{name}3"]]
    (folder / "several.html").write_text(page(runs, ["seed", "note"], words), "utf-8")
    evil = "<script>document.title = 'harm'</script><img src=x onerror=\"document.title = 'harm'\">"
    content = report()
    content["model"]["name"] = content["calibration"]["source"] = content["warnings"][0] = evil
    (folder / "evil.html").write_text(page([report_of(content, "r")] * 2, [evil], [[evil, evil]] * 2), "utf-8")
    return folder


def opened(browser: Any, path: Path) -> tuple[Any, list[str]]:
    """The page, and a list of what the browser complains of or asks a network for."""
    found, said = browser.new_context(offline=True).new_page(), []
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    found.on("request", lambda request: said.extend([request.url] if not request.url.startswith(LOCAL) else []))
    found.goto(path.as_uri())
    return found, said


@pytest.mark.parametrize("name", [*KINDS, "several", "evil"])
def test_it_fits_is_readable_and_says_nothing(browser: Any, written: Path, name: str) -> None:
    found, said = opened(browser, written / f"{name}.html")
    grounds = set()
    for width, scheme in ((400, "light"), (400, "dark"), (1280, "dark"), (1280, "light")):
        found.set_viewport_size({"width": width, "height": 800})
        found.emulate_media(color_scheme=scheme)
        canvases = found.locator("canvas:visible")
        for i in range(canvases.count()):  # drawn when they are seen
            canvases.nth(i).scroll_into_view_if_needed()
        found.wait_for_function(DRAWN)
        assert found.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
        assert found.evaluate(CONTRAST) >= 4.5, scheme
        grounds.add(found.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    assert said == []
    assert found.title() != "harm"
    assert found.locator("img").count() == 0
    found.context.close()


def cells(found: Any, column: int) -> list[str]:
    texts: list[str] = found.locator(f".sorts >> nth=0 >> tbody tr > :nth-child({column})").all_inner_texts()
    return texts


def test_a_click_on_a_heading_sorts(browser: Any, written: Path) -> None:
    found, said = opened(browser, written / "several.html")
    heading = found.locator(".sorts >> nth=0 >> thead button")
    heading.nth(1).click()  # seed: numbers, an empty one last
    assert cells(found, 2) == ["9", "10", "100", ""]
    heading.nth(1).click()
    assert [text for text in cells(found, 2) if text] == ["100", "10", "9"]
    heading.nth(2).click()  # note: words
    assert cells(found, 3) == ["a", "b", "b", "c"]
    removed = heading.filter(has_text="MACs removed")
    removed.click()
    assert cells(found, 6) == ["−25.0%", "−33.3%", "−41.7%", "−75.0%"]
    assert removed.locator("..").get_attribute("aria-sort") == "ascending"
    assert said == []
    found.context.close()


def test_a_run_is_picked_and_the_measure_changed(browser: Any, written: Path) -> None:
    found, said = opened(browser, written / "several.html")
    shown = found.locator("article:visible")
    assert shown.count() == 1
    assert shown.get_attribute("data-run") == "0"  # the only one within a point
    found.locator("[data-pick='3']").click()
    assert shown.get_attribute("data-run") == "3"
    assert found.locator("#run").input_value() == "3"
    found.locator("#run").select_option("1")
    assert shown.get_attribute("data-run") == "1"
    drawn = "Chart.getChart(document.querySelector('canvas')).options.scales.y.title.text"
    assert found.evaluate(drawn) == "top-1, %"
    found.locator("#measure").select_option(label="KL to the dense model, nats")
    assert found.evaluate(drawn) == "KL to the dense model, nats"
    front = "Chart.getChart(document.querySelector('canvas')).data.datasets[0].data.map((point) => point.run)"
    assert found.evaluate(front) == [3, 1, 0]
    found.emulate_media(color_scheme="dark")
    assert said == []
    found.context.close()
