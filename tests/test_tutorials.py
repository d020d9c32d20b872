"""The tutorials run as plain scripts, and their pages and notebooks are those scripts."""

import importlib.util
import json
import os
import re
import resource
import sys
from pathlib import Path

import pytest

from tests.running import python

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
SCRIPTS = sorted(p for p in TUTORIALS.glob("*.py") if p.stem != "write")


@pytest.fixture(scope="module")
def write():
    spec = importlib.util.spec_from_file_location("write_tutorials", TUTORIALS / "write.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_tutorial_is_listed(write):
    assert {p.stem for p in SCRIPTS} == set(write.NAMES)
    assert tuple(re.findall(r"\((\w+)\.md\)", (TUTORIALS / "index.md").read_text())) == write.NAMES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_page_and_notebook_are_the_script(write, script):
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


FIRST = "how_sure"  # which runs on every commit


@pytest.mark.parametrize(
    "script",
    [p if p.stem == FIRST else pytest.param(p, marks=pytest.mark.slow) for p in SCRIPTS],
    ids=lambda p: p.stem,
)
def test_tutorial_runs(script, tmp_path):
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"MPLBACKEND": "Agg", "PATH": here}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ignored = ("-W", "ignore:FigureCanvasAgg is non-interactive")
    done = python("-W", "error", *ignored, script, cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 120  # what a reader is promised
