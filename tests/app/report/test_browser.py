"""The report in a real browser: every picture decodes, nothing overflows."""

import pytest

from tests.app.report import browser, runs
from vardrop.app.report import report

NEEDED = "needs Debian's chromium: apt-get install chromium"
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason=NEEDED)

_DECODED = """Promise.all([...document.images].map(i => i.decode())).then(
    () => [...document.images].map(i => i.naturalWidth))"""

_WHITE = "[...document.images].filter(i => getComputedStyle(i).filter === 'none' && getComputedStyle(i).backgroundColor !== 'rgba(0, 0, 0, 0)').length"
_HEADLINE = "document.querySelector('.verdict b').getBoundingClientRect().bottom"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    several = [runs.classification(base / n, seed=i) for i, n in enumerate(("one", "two"))]
    several.append(runs.regression(base / ("a_rather_long_name_of_a_run_" * 3)))
    several_page = report(several, base / "several.html")
    return {"one": report(several[:1]).as_uri(), "several": several_page.as_uri()}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("which", ["one", "several"])
def test_opens_without_a_complaint(tab, pages, which, width, dark):
    tab.events.clear()
    tab.open(pages[which], width, dark)
    widths = tab.evaluate(_DECODED)
    assert len(widths) >= 6
    assert min(widths) > 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints() == []
    assert [url for url in tab.requests() if not url.startswith("data:")] == [pages[which]]
    assert tab.evaluate("[...document.images].every(i => i.alt.length > 15)")
    if dark:
        assert tab.evaluate(_WHITE) == 0
    if (which, width) == ("one", 390):  # the headline is on the first screen of a phone
        assert tab.evaluate(_HEADLINE) < 844


def test_the_check_for_complaints_can_fail(tab, tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('no'); missing()</script>")
    tab.events.clear()
    tab.open((tmp_path / "bad.html").as_uri(), 390)
    tab.evaluate("1")
    assert len(tab.complaints()) == 2


def test_prints(tab, pages):
    tab.open(pages["several"], 1200)
    assert len(tab.call("Page.printToPDF")["data"]) > 10_000
