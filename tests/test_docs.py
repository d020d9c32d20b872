"""Every example of the README and of docs/ runs: the blocks of a page one after another."""

import re
import shlex
from pathlib import Path

import pytest

import vardrop as vd
from vardrop.application import METHODS
from vardrop.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"huggingface": "transformers"}  # by page
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_commands(text):
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "vardrop", line
            with pytest.raises(SystemExit) as left:
                main(words[1:])
            assert left.value.code == 0, line


def test_the_table_of_methods_is_whole_and_its_calls_are_methods():
    table = [line for line in PAGES[0].read_text().splitlines() if line.startswith("|")]
    calls = re.findall(r"`(vd\.(\w+)\(.*?\))`", "\n".join(table))
    assert {name for _, name in calls} == set(METHODS)
    for call, _ in calls:
        assert isinstance(eval(call, {"vd": vd}), vd.BaseRecipe), call


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    blocks = BLOCK.findall(page.read_text())
    assert blocks, f"{page.name} has no examples"
    for language, text in blocks:
        if language == "sh":
            run_commands(text)
        else:
            exec(compile(text, page.name, "exec"), names)
