"""The site builds without a warning, and its pages open from disk with nothing from elsewhere."""

import re

import pytest

from tests.running import ROOT, python

LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "mkdocs", "build", "--quiet", "--strict", "-d", folder)
    done = python(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_every_page_is_built(site):
    pages = (ROOT / "docs").rglob("*.md")
    sources = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in pages}
    assert {p.relative_to(site) for p in site.rglob("*.html")} >= sources


def test_nothing_is_loaded_from_elsewhere(site):
    for page in {*site.rglob("*.html")} - {site / "404.html"}:  # which needs a server
        for target in LOADED.findall(page.read_text()):
            assert not re.match(r"(https?:)?//", target), f"{page.name}: {target}"
            path = target.partition("#")[0].partition("?")[0]
            assert path.startswith("data:") or (page.parent / path).is_file(), f"{page}: {target}"


def test_formulas_are_drawn_without_a_script(site):
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert not any("arithmatex" in page for page in pages)
    assert sum(page.count("<math") for page in pages) > 20
