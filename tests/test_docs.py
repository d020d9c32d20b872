"""The examples of the README and of docs/ run, and the numbers of pages match their result files."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vardrop as vd
from vardrop.app.cli import main
from vardrop.app.runs import METHODS

ROOT = Path(__file__).parent.parent
GENERATED = ("reference", "results", "tutorials")  # they have their own tests
MARKDOWN = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in MARKDOWN if page.parent.name not in GENERATED)]
OUTSIDE_DOCS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PROSE = {"results"}  # pages without examples
# Pages over five seconds, except for the one that every reader starts with (quickstart).
SLOW = {"README", "choose", "evaluate", "fit", "serve", "slim"}
NEEDS = {"huggingface": "transformers"}  # by page
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_commands(text):
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "vardrop", line
            with pytest.raises(SystemExit) as exit_:
                main(words[1:])
            assert exit_.value.code == 0, line


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
NUMBER = r"\d+(?:\.\d+)?"
FIGURE = re.compile(rf"(-?{NUMBER}) ± ({NUMBER})|(?<![\w.-])(-?\d+\.\d+)(?![\w.-])")


def rounded(value, text):
    """Whether `text` is `value` rounded."""
    return abs(value - float(text)) <= 0.5001 * 10 ** -len(text.partition(".")[2])


def written(figures, value, error):
    """Whether a mean and its standard error, if shown, belong to one result."""
    return any(
        rounded(f["mean"], value) and (not error or rounded(f.get("standard_error") or 0, error))
        for f in figures
    )


def figures_of(row):
    for name in RESULT.findall(row):
        result = json.loads((ROOT / name).read_text())
        yield from result["figures"].values()
        yield from ({"mean": value} for value in result["expected"].values())  # of the paper


def test_numbers_agree_with_the_result_files_named_next_to_them():
    checked = 0
    for page in {*PAGES, *MARKDOWN} - {ROOT / "docs" / "results.md"}:
        for row in re.split(r"\n\n|\n(?=\|)", page.read_text()):
            figures = list(figures_of(row))
            for value, error, alone in FIGURE.findall(row) if figures else ():
                checked += 1
                assert written(figures, value or alone, error), f"{page.name}: {value}{alone} {row}"
    assert checked > 40


def test_blocks_have_languages_that_are_run():
    languages = {"python", "sh", "js", ""}  # js: tests/test_export_browser.py
    for page in {*PAGES, *MARKDOWN, *OUTSIDE_DOCS}:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(fences) <= languages, page.name


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow) if p.stem in SLOW else p for p in PAGES],
    ids=lambda p: str(p.relative_to(ROOT).with_suffix("")),
)
def test_the_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")  # so that its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    blocks = BLOCK.findall(page.read_text())
    assert bool(blocks) != (page.stem in PROSE), f"{page.name}: examples"
    for language, text in blocks:
        if language == "sh":
            run_commands(text)
        else:
            exec(compile(text, page.name, "exec"), vars(module))
