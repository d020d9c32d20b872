"""The pages of results: their lines, their plots, and that docs/ shows what results/ holds."""

import json
from itertools import islice
from pathlib import Path

import pytest

from experiments import page as pages
from experiments.command import FUNCTIONS
from experiments.readme import PAGES, fill_tables
from experiments.runner import experiments, finished, outside, reproduce, result_path
from experiments.verdicts import Item, count_verdicts, lead, load_items
from tests.experiments.toy import describe, toy_training
from tests.refusals import assert_refused
from tests.running import ROOT
from vardrop.app.data import data_directory

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
    paths = {result_path(experiment, ROOT / "results"): experiment for experiment in KNOWN.values()}
    assert set((ROOT / "results").glob("*/*.json")) <= set(paths)
    for path, experiment in paths.items():
        if finished(experiment, path):
            stored = json.loads(path.read_text())
            for key in ("name", "title", "paper", "source", "expected", "notes"):
                assert stored[key] == getattr(experiment, key), f"{path}: reproduce --page"
            assert {*experiment.expected, *experiment.headline} <= set(stored["figures"]), path


# Verdicts on the papers' results, as computed from both values.


@pytest.mark.parametrize("direction, paper, ours, error, expected", [
    ("lower", 2.0, 1.5, 0, 1),
    ("lower", 2.0, 1.5, 0.3, 0),  # within two standard errors
    ("lower", 2.0, 2.5, 0.3, 0),
    ("lower", 2.0, 2.5, 0.1, -1),
    ("higher", 68, 68.4, 0, 0),  # 68 is anything from 67.5 to 68.5
    ("higher", 68, 67.4, 0, -1),
    ("higher", 68, 70.0, 0, 1),
    ("lower", 1.92, 1.924, 0, 0),
    ("lower", 1.92, 1.93, 0, -1),
    ("lower", 1.0, 1.4, 0, -1),  # not half a unit of 1, which may be 1.0
    ("same", 10.0, 10.9, 0, 0),
    ("same", 10.0, 11.1, 0, -1),
    ("same", 10.0, 11.1, 0.6, 0),
    ("same", 0.0, 8e-15, 0, 0),
    ("same", 0.0, 1e-6, 0, -1),
    ("lower", 0.0, 3.7, 2.7, 0),
])  # fmt: skip
def test_a_lead_is_more_than_the_slack(direction, paper, ours, error, expected):
    assert lead(direction, paper, ours, error) == expected


def item(values, errors=(None, None)):
    """An item of two values, which are 2 (lower is better) and 10 (higher) in the paper."""
    names = ("error, %", "size")
    rows = zip(names, values, errors, strict=True)
    results = {name: {"mean": value, "standard_error": error} for name, value, error in rows}
    row = {"expected": dict(zip(names, (2.0, 10), strict=True))}
    return Item("a", row | {"result": {"figures": results}}, dict(zip(names, ("lower", "higher"), strict=True)), "")  # fmt: skip


@pytest.mark.parametrize("values, verdict", [
    ((1.0, 10), "better"), ((2.0, 10), "reached"), ((1.0, 5), "trade-off"), ((2.0, 5), "behind"),
])  # fmt: skip
def test_the_values_of_an_item_are_judged_together(values, verdict):
    assert item(values).verdict == verdict
    assert count_verdicts([item(values)])[verdict] == 1
    assert Item("a", {"result": None}, {}, "").verdict == "not run"


def test_the_variance_is_pooled_over_values_of_one_kind():
    names = ("none, 100 units", "binary, 100 units", "gain")
    errors = {"none, 100 units": 0.0, "binary, 100 units": 0.2, "gain": 9.0}
    figures = {n: {"mean": 1.25, "standard_error": errors[n]} for n in names}
    row = {"expected": dict.fromkeys(names, 1.0), "result": {"figures": figures}}
    judged = Item("a", row, {"none, 100 units": "lower"}, "")
    assert judged.verdict == "reached"  # 2 sqrt(0.04 / 2) = 0.28
    del row["expected"]["binary, 100 units"]
    assert judged.verdict == "behind"


def test_every_item_that_is_not_reached_has_a_cause():
    _, items = load_page(ROOT, "results")
    assert len(items) == 64
    assert 14 <= sum(bool(item.claim) for item in items) <= 16
    unmet = [item for item in items if item.verdict in ("trade-off", "behind")]
    assert [item.name for item in unmet if not item.row["cause"]] == []


@pytest.mark.parametrize("experiment, figures, claims, error", [
    ("toy/ran", '{ loss = "lower" }', "", "to name an experiment and its expected figures in 'Toy'"),
    ("toy/run", '{ speed = "lower" }', "", r"but got 'toy/run' with \['speed'\]"),
    ("toy/run", '{ loss = "smaller" }', "", r"to be one of .*, but got \['smaller'\]"),
    ("toy/run", '{ loss = "lower" }', 'Toys = "x"', r"to name judged items, but got \['Toys'\]"),
])  # fmt: skip
def test_items_that_do_not_fit_are_refused(tmp_path, experiment, figures, claims, error):
    path = tmp_path / "judged.toml"
    assert load_items(path, []) == []
    path.write_text(f'[[item]]\nname = "Toy"\nexperiment = "{experiment}"\nfigures = {figures}\n')
    path.with_name("claims.toml").write_text(claims)
    assert_refused(error, load_items, path, [{"name": "toy/run", "expected": {"loss": 1.0}}])


# The LeNets shrunk and packed: what was recorded, and what training from scratch gives.


KNOWN = experiments(ROOT / "experiments")


def result(name):
    path = result_path(KNOWN[name], ROOT / "results")
    assert finished(KNOWN[name], path)  # with the arguments of the description
    return json.loads(path.read_text())["runs"][0]


def test_recorded_results_meet_the_bounds():
    run = result("louizos/lenet300")
    figures, times = run["figures"], run["latency"]
    assert figures["times fewer weights"] >= 60
    assert figures["error of the small net, %"] <= 1.9
    assert figures["times fewer bytes"] >= 180
    assert abs(figures["error of the file, %"] - figures["error of the small net, %"]) <= 0.1
    assert times["256"]["dense"] >= 4 * times["256"]["small"]
    assert times["1"]["dense"] >= 1.2 * times["1"]["small"]
    times = result("louizos/lenet5-channels")["latency"]["256"]  # also in onnxruntime
    assert times["dense"] >= 3 * times["small"]
    assert times["dense"] >= 8 * times["onnx small"]


# The quick version of every experiment keeps its bounds, which fail when a method stops working.


MNIST = (data_directory() or Path()) / "mnist"


@pytest.mark.slow
@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not there (VARDROP_DATA)")
@pytest.mark.parametrize("name", KNOWN)
def test_the_quick_version_keeps_its_bounds(name: str, tmp_path: Path) -> None:
    if name == "neklyudov/cartpole":
        pytest.importorskip("gymnasium", reason="needs the extra `rl`")
    (result,) = reproduce(KNOWN[name], FUNCTIONS, tmp_path / "run.json", quick=True)
    assert outside(result["figures"], KNOWN[name].bounds) == []


def test_tables_of_pages_are_filled_from_results(tmp_path):
    figures = {"error": {"mean": 1.6261, "standard_error": 0.1312}}
    done = {"name": "toy/done", "result": {"runs": [{}] * 3, "figures": figures}}
    table = [done, {"name": "toy/missing", "result": None}]
    described = tmp_path / "readme.toml"
    described.write_text(
        '[errors]\ncolumns = ["task", "ours"]\nrows = [["digits", "{toy/done: error} (sparse VD)"],'
        ' ["letters", "{toy/missing: error}"]]\n'
    )
    page = "Before.\n<!-- table errors -->\nold\n<!-- end -->\nAfter.\n"
    filled = fill_tables(page, described, table)
    assert filled.splitlines()[1:-2] == [
        "<!-- table errors -->",
        "| task | ours |",
        "| --- | --: |",
        "| digits | 1.63 ± 0.13 (sparse VD) |",
        "",
        "Source: `results/toy/done.json`",
    ]
    assert fill_tables(filled, described, table) == filled
    two = [done, {"name": "toy/missing", "result": done["result"]}]
    assert fill_tables(page, described, two).splitlines()[2:6] == [
        "| task | ours | file |",
        "| --- | --: | --- |",
        "| digits | 1.63 ± 0.13 (sparse VD) | `results/toy/done.json` |",
        "| letters | 1.63 ± 0.13 | `results/toy/missing.json` |",
    ]
    done["result"]["runs"] = [{}]
    assert_refused("toy/done to have 3 seeds, but got 1", fill_tables, page, described, table)


def test_the_tables_of_the_readme_are_up_to_date():
    table, _ = load_page(ROOT, "results")
    for name in PAGES:
        text = (ROOT / name).read_text()
        filled = fill_tables(text, ROOT / "experiments" / "readme.toml", table)
        assert filled == text, f"{name} is out of date: vardrop reproduce --page"
