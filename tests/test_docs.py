"""The examples of the README and of docs/ run and print what the pages show; numbers match files."""

import json
import os
import re
import resource
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import typer
from docs import outputs
from docs.tutorials import write

import vardrop as vd
from tests.running import ROOT, TORCHRUN, python
from vardrop.app.cli.commands import app
from vardrop.app.runs import METHODS

GENERATED = ("reference", "results", "tutorials")  # they have their own tests
MARKDOWN = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in MARKDOWN if page.parent.name not in GENERATED)]
OUTSIDE_DOCS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PROSE = {"results", "reliability", "stability"}  # pages without examples
# Pages over five seconds, except for the one that every reader starts with (quickstart).
SLOW = {"README", "choose", "cnn", "evaluate", "fit", "images", "samples", "serve", "slim"}
NEEDS = {"huggingface": "transformers"}  # by page
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_the_table_of_methods_is_complete_and_its_calls_are_methods():
    table = [line for line in PAGES[0].read_text().splitlines() if line.startswith("|")]
    calls = re.findall(r"`(vd\.(\w+)\(.*?\))`", "\n".join(table))
    assert {name for _, name in calls} == set(METHODS)
    for call, _ in calls:
        assert isinstance(eval(call, {"vd": vd}), vd.BaseRecipe), call


def test_links_have_targets():
    for page in {*PAGES, *MARKDOWN, *OUTSIDE_DOCS}:
        prose = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


RESULT = re.compile(r"`(results/[\w/.-]+\.json)`")
# tests/experiments/test_page.py compares these tables with the result files.
WRITTEN_TABLE = re.compile(r"<!-- table .*?<!-- end -->", re.DOTALL)
NUMBER = r"\d+(?:\.\d+)?"
FIGURE = re.compile(rf"(-?{NUMBER}) ± ({NUMBER})|(?<![\w.-])(-?\d+\.\d+)(?![\w.-])")


def rounded(value, text):
    """Whether `text` is `value` rounded."""
    return abs(value - float(text)) <= 0.5001 * 10 ** -len(text.partition(".")[2])


def written(figures, value, error):
    """Whether a mean and its standard error, if shown, belong to one result."""
    near = [f for f in figures if rounded(f["mean"], value)]
    return any(not error or rounded(f.get("standard_error") or 0, error) for f in near)


def test_numbers_agree_with_the_result_files_named_next_to_them():
    checked = 0
    for page in {*PAGES, *MARKDOWN} - {ROOT / "docs" / "results.md"}:
        prose = WRITTEN_TABLE.sub("", page.read_text())
        for row in re.split(r"\n\n|\n(?=\|)", prose):
            results = [json.loads((ROOT / name).read_text()) for name in RESULT.findall(row)]
            figures = [figure for result in results for figure in result["figures"].values()]
            papers = [value for result in results for value in result["expected"].values()]
            figures += [{"mean": value} for value in papers]
            if FIGURE.search(row) and any(len(result["runs"]) < 3 for result in results):
                told = f"{page.name}: fewer than three seeds and no remark: {row}"
                assert "one seed" in row, told
            for value, error, alone in FIGURE.findall(row) if figures else ():
                checked += 1
                assert written(figures, value or alone, error), f"{page.name}: {value}{alone} {row}"
    assert checked > 40


def test_blocks_have_languages_that_are_run():
    languages = {"python", "sh", "js", ""}  # js: tests/test_export_browser.py
    for page in {*PAGES, *MARKDOWN, *OUTSIDE_DOCS}:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(fences) <= languages, page.name


RUN = [pytest.param(p, marks=pytest.mark.slow) if p.stem in SLOW else p for p in PAGES]


@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT).with_suffix("")))
def test_the_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")  # so that its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    assert bool(outputs.BLOCK.search(page.read_text())) != (page.stem in PROSE), "examples"
    differences = []
    torch.manual_seed(12345)  # pages that print numbers set their own seed
    with mock.patch.dict(METHODS):  # a page may register a method
        for source, shown, printed in outputs.run_page(page, module):
            if shown and (difference := outputs.compare(shown, printed)):
                differences.append(f"{difference}, after:\n{source}")
    assert differences == []


def test_outputs_that_differ_are_found():
    assert outputs.compare("a 1.00\nb 2,000\n", "a 1.01\n\nb  2,001\n") == ""
    assert outputs.compare("a 1.00\n", "a 1.30\n") == "a 1.00 is now a 1.30"
    assert outputs.compare("accuracy 0.95\n", "precision 0.95\n") != ""
    assert outputs.compare("a\n", "a\nb\n") == "b is not shown"
    assert outputs.compare("a\n…\nz\n", "a\nb\nc\n") == "z is now missing"
    assert outputs.compare("x  seconds\n3  0.5\n", "x  seconds\n3  9.5\n") == ""
    assert outputs.compare("x  seconds\n3  0.5\n", "x  seconds\n4  0.5\n") != ""


# The site builds without a warning, and its pages open from disk with nothing from elsewhere.


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


@pytest.mark.slow
def test_every_page_is_built(site):
    pages = (ROOT / "docs").rglob("*.md")
    sources = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in pages}
    assert {p.relative_to(site) for p in site.rglob("*.html")} >= sources


@pytest.mark.slow
def test_the_reference_of_the_command_line_is_complete(site):
    page = (site / "reference" / "cli.html").read_text()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"vardrop {name}" in page
        options = [flag for p in command.params for flag in p.opts if flag.startswith("--")]
        assert [flag for flag in options if flag not in page] == []
    assert {"fit", "compare"} <= set(group.commands)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    for page in {*site.rglob("*.html")} - {site / "404.html"}:  # which needs a server
        for target in LOADED.findall(page.read_text()):
            assert not re.match(r"(https?:)?//", target), f"{page.name}: {target}"
            path = target.partition("#")[0].partition("?")[0]
            assert path.startswith("data:") or (page.parent / path).is_file(), f"{page}: {target}"


@pytest.mark.slow
def test_formulas_are_drawn_without_a_script(site):
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert not any("arithmatex" in page for page in pages)
    assert sum(page.count("<math") for page in pages) > 20


# The tutorials run as plain scripts, and their pages and notebooks are those scripts.


TUTORIALS = ROOT / "docs" / "tutorials"
SCRIPTS = sorted(p for p in TUTORIALS.glob("*.py") if p.stem != "write")


def test_every_tutorial_is_listed():
    assert {p.stem for p in SCRIPTS} == set(write.NAMES)
    assert tuple(re.findall(r"\((\w+)\.md\)", (TUTORIALS / "index.md").read_text())) == write.NAMES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_page_and_notebook_are_the_script(script):
    cells = write.cells(script.read_text())
    assert len(cells) > 8
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    told = [(c["cell_type"] == "code", "".join(c["source"])) for c in notebook["cells"]]
    assert told == [(c.code, c.source) for c in cells]
    page = script.with_suffix(".md").read_text()
    places = [page.index(f"```python\n{c.source}\n```" if c.code else c.source) for c in cells]
    assert places == sorted(places)
    drawn = {p.name for p in TUTORIALS.glob(f"{script.stem}-*.png")}
    assert set(re.findall(r"\((\S+\.png)\)", page)) == drawn


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_names_in_tutorials_are_public(script):
    names = re.findall(r"\bvd\.(\w+)", script.read_text())
    assert [name for name in names if not hasattr(vd, name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_tutorial_runs(script, tmp_path):
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"MPLBACKEND": "Agg", "PATH": here}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ignored = ("-W", "ignore:FigureCanvasAgg is non-interactive")
    done = python("-W", "error", *ignored, script, cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 120  # what a reader is promised


# The example scripts run as their first lines say.


COMMANDS = {
    "fsdp2": (TORCHRUN, "torch", r"rank 1: 70914 of 141828 parameters, KL \d+, accuracy 0\.9"),
    "accelerate_loop": (TORCHRUN, "accelerate", r"2 processes, accuracy 0\.9"),
    "lightning_ddp": ((), "lightning", r"'val_nll': 0\.\d+, 'sparsity': 0\.\d+"),
    "gpu_smoke": ((), "torch", r"8 of 8 steps passed"),
    "ray_train": ((), "ray", r"'nll': 0\.\d+"),
}


def test_every_example_is_run():
    assert set(COMMANDS) == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_example(name):
    command, package, expected = COMMANDS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = python(*command, ROOT / "examples" / f"{name}.py")
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(expected, found.stdout), found.stdout[-2000:]
