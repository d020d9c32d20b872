"""The pages of results: their lines, their plots, and that docs/ shows what results/ holds."""

import json
from itertools import islice
from pathlib import Path

import pytest

from experiments import page as pages
from experiments.runner import experiments, finished, reproduce, result_path
from experiments.verdicts import load_items
from tests.experiments.toy import describe, toy_training

ROOT = Path(__file__).parents[2]
CURVES = '[plot]\nx = "epoch"\ny = ["loss"]\nlog = "y"\n'
BARS = '[plot]\nbars = "s"\n'
JUDGED = '[[item]]\nname = "Toy"\nexperiment = "toy/{}"\nfigures = {{ loss = "lower" }}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Descriptions of a finished run, an unfinished one and one without a result."""
    folder = tmp_path_factory.mktemp("page")
    described = describe(folder / "experiments", CURVES, "toy/done")
    half = describe(described, BARS, "toy/half") / "toy" / "half.toml"
    half.write_text('headline = ["seed"]\n' + half.read_text())
    describe(described, CURVES, "toy/never")
    (described / "judged.toml").write_text(JUDGED.format("done"))
    (described / "claims.toml").write_text('Toy = "A toy has a loss"\n')
    for name, seeds in (("toy/done", 3), ("toy/half", 1)):
        experiment, functions = experiments(described)[name], {"toy_training": toy_training}
        list(islice(reproduce(experiment, functions, folder / f"{name}.json"), seeds))
    return folder


def load_page(folder, results="."):
    table = pages.rows(experiments(folder / "experiments"), folder / results)
    return table, load_items(folder / "experiments" / "judged.toml", table)


def test_a_paper_has_its_values_next_to_ours(folder):
    table, _ = load_page(folder)
    page = pages.paper_page(table)
    done, half, never = (line for line in page.splitlines() if line.startswith("| ["))
    assert done.startswith("| [done](#done) | loss | 0.5 | 0.")
    assert done.endswith(" | 3 |")
    assert "±" in done
    assert half.startswith("| [half](#half) | loss<br>seed | 0.5<br> | 0.")
    assert half.endswith("<br>0 | 1 of 3 |")
    assert never == "| [never](#never) | loss | 0.5 | not run | 0 of 3 |"
    assert page.count("![A toy]") == 2
    assert "`vardrop reproduce toy/done`, 2 minutes. For tests." in page


@pytest.mark.parametrize("mean, error, text", [
    (4913.6, 896.4, "4 900 ± 900"), (1.6261, 0.1312, "1.63 ± 0.13"), (98.2, 0.0312, "98.20 ± 0.03"),
    (8.331e-15, 1.2e-15, "< 1e-9"), (9.8, 0.0, "9.8"), (9.8, 2.8e-17, "9.8"), (0.0, None, "0"),
    (2.5e-7, 3e-8, "2.5e-07 ± 3e-08"), (-64321.0, None, "-64 321"), (0.99876, None, "0.9988"),
])  # fmt: skip
def test_values_have_the_digits_that_their_error_allows(mean, error, text):
    assert pages.format_mean({"mean": mean, "standard_error": error}) == text


def test_the_summary_has_claims_with_verdicts_and_pictures(folder):
    table, items = load_page(folder)
    page = pages.summary_page(table, items)
    (claim,) = (line for line in page.splitlines() if line.startswith("| [A toy has a loss]"))
    assert claim.startswith("| [A toy has a loss](results/toy.md#done) | 0.5 | 0.")
    assert claim.endswith("| 3 | behind |")
    assert "0 of 1 items are reached or better: 0 better, 0 reached, 0 trade-off, 1 behind" in page
    assert "![Nobody 2020](results/toy.png)" in page
    assert "| [Toy](results/toy.md#done) | 0.5 |" in page  # not reached, with its cause


def test_plots_name_the_digest_of_their_data(folder):
    table, items = load_page(folder)
    path = pages.write_pages(table, items, folder / "docs")
    assert path.read_text() == pages.summary_page(table, items)
    assert (folder / "docs/results/toy.md").read_text() == pages.paper_page(table)
    for name, row in ((pages.picture(table[0]), table[0]), (pages.picture(table[1]), table[1])):
        png = (folder / "docs" / "results" / name).read_bytes()
        assert png.startswith(b"\x89PNG")
        assert row["digest"].encode() in png
    assert table[0]["digest"].encode() in (folder / "docs/results/toy.png").read_bytes()
    assert pages.plot(table[2]) is None
    assert len(list((folder / "docs" / "results").glob("*.png"))) == 3


def test_the_pages_in_docs_are_up_to_date():
    (table, items), docs, remedy = load_page(ROOT, "results"), ROOT / "docs", "reproduce --page"
    assert (docs / "results.md").read_text() == pages.summary_page(table, items), remedy
    groups = pages.group_by_paper(table)
    assert {path.stem for path in (docs / "results").glob("*.md")} == set(groups)
    for paper, group in groups.items():
        page = (docs / "results" / f"{paper}.md").read_text()
        assert page == pages.paper_page(group), f"{paper}.md is out of date: {remedy}"
        assert page.count("\n") <= 150
    plotted = [row for row in table if row["result"] is not None and row["plot"]]
    for row in plotted:
        png = (docs / "results" / pages.picture(row)).read_bytes()
        assert row["digest"].encode() in png, f"{pages.picture(row)} is out of date: {remedy}"
    names = {path.name for path in (docs / "results").glob("*.png")}
    assert names - {f"{paper}.png" for paper in groups} == set(map(pages.picture, plotted))


def test_results_agree_with_their_descriptions():
    described = experiments(ROOT / "experiments").values()
    paths = {result_path(experiment, ROOT / "results"): experiment for experiment in described}
    assert set((ROOT / "results").glob("*/*.json")) <= set(paths)
    for path, experiment in paths.items():
        if finished(experiment, path):
            stored = json.loads(path.read_text())
            for key in ("name", "title", "paper", "source", "expected", "notes"):
                assert stored[key] == getattr(experiment, key), f"{path}: reproduce --page"
            assert {*experiment.expected, *experiment.headline} <= set(stored["figures"]), path
