"""The report as a file: complete, self-contained, escaped, and clear about broken runs."""

import math
import re
from html.parser import HTMLParser

import pytest
import torch

from tests.app.report import runs
from tests.refusals import assert_refused
from vardrop._core.files import with_checksum, write_json
from vardrop._core.values import to_json
from vardrop.app.report import read_run, report
from vardrop.app.report.gallery import PICTURES
from vardrop.app.score_texts import SCORES, judge_difference
from vardrop.app.store import method_name
from vardrop.metrics.intervals import Estimate
from vardrop.recipes import METHODS

MINIMAL = {"command": "vardrop fit digits"}
DRAW = {picture.title: picture.draw for picture in PICTURES}


class Tags(HTMLParser):
    """Collects the tags of a page and checks that they nest."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.found, self.stack = [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def page(*arguments, **options):
    return report(*arguments, **options).read_text(encoding="utf-8")


def images(text):
    return [attrs for tag, attrs in Tags(text).found if tag == "img"]


def words(text):
    """The text of a page without its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<style.*?</style>", "", text)).split())


def said(tmp_path, **parts):
    """The text of a page on a run with these parts."""
    return words(page([runs.write(tmp_path / "a", **{"config": MINIMAL, **parts})]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = runs.classification(tmp_path_factory.mktemp("runs") / "a")
    path = report([run])
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


PARTS = """Predicts one of 10 classes of mnist with the model lenet5, trained on 54,000 examples with
method sparse_vd (posterior log_sigma2=-8).
Accuracy 0.9912 [
on test data; most frequent class: 0.1135.
Better than the plain model on held-out examples: NLL 0.0355, plain model 0.0411; difference -0.0056 ± 0.0021.
1.5% of the weights and 50.0% of the multiplications left after compression; accuracy on test data 0.9912 to 0.9904; packed file: 1,200 bytes.
The test part has no row of class 7
this model plain model most frequent class accuracy
NLL on held-out examples of the training data, in turn; lower is better 0.0355 0.0411 2.3010
AUROC of the entropy, fashion-mnist 0.9810
weights left 470
packed bytes 1,200
Reliability On the diagonal
Training curves NLL per example
Brier score
Test examples by true class
vardrop fit mnist --net lenet5
torch 2.13.0
30 epochs, 45.0 seconds
load_run("""


def test_a_complete_run_shows_everything_in_order(whole):
    places = [words(whole).index(text) for text in PARTS.splitlines()]
    assert places == sorted(places)


def test_every_score_has_its_meaning_and_every_picture_of_the_task_is_drawn(whole):
    for name in ("accuracy", "nll", "ece", "brier"):
        title, text, better = SCORES[name]
        assert f"{title} {text}; {better} is better" in words(whole)
    alts = [image["alt"] for image in images(whole)]
    titles = [p.title for p in PICTURES if p.title != "Prediction interval"]
    assert all(any(alt.startswith(title) for alt in alts) for title in titles)


def test_a_regression_has_its_own_pictures(tmp_path):
    run = runs.regression(tmp_path / "houses")
    text = page([run])
    assert "Reliability" not in text
    assert any(i["alt"].startswith("Prediction interval") for i in images(text))
    assert "Predicts &#39;price&#39; of houses.csv" in text
    ((_, ax),) = DRAW["Prediction interval"](read_run(run))
    assert ax.get_ylabel() == "price"


def test_layers_keep_their_order_and_those_that_are_numbers_have_their_kind(tmp_path):
    layers = [{"name": n, "kind": k, "weights": 9} for n, k in (("0", "Conv2d"), ("fc", "Linear"))]
    run = read_run(runs.write(tmp_path / "a", config=MINIMAL, results={"layers": layers}))
    assert [run.label(n) for n in ("0", "fc", "3")] == ["Conv2d 0", "fc", "layer 3"]
    run = read_run(runs.classification(tmp_path / "b"))
    assert list(run.fractions()) == list(runs.LAYERS)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_called_by_their_name(name):
    assert method_name(to_json(METHODS[name]())) == name


def test_of_several_runs_only_the_differences_are_listed(tmp_path):
    pair = []
    for name, seed in (("a", 0), ("b", 1)):
        settings = {"epochs": 30, "lr": 0.01, "seed": seed}
        pair.append(runs.write(tmp_path / name, config={**MINIMAL, "settings": settings}))
    said = words(page(pair, out=tmp_path / "r.html"))
    assert "What differs a b settings seed 0 1" in said
    assert "epochs" not in said.partition("What differs")[2]
    assert "settings epochs 30, lr 0.01, seed 0" in words(page(pair[:1]))


def test_several_runs_share_a_baseline_and_are_compared_with_intervals(tmp_path):
    config, results, pair = runs.config("mnist", "vardrop fit mnist"), runs.results(), []
    for name, shift in (("one", 0.0), ("two", 0.5)):
        arrays = runs.arrays()
        arrays["log_prob"] = arrays["log_prob"] - shift
        results["metrics"]["nll"] += shift
        pair.append(runs.write(tmp_path / name, config=config, results=results, arrays=arrays))
    text = page(pair, out=tmp_path / "r.html")
    said = words(text)
    assert "one two plain model most frequent class accuracy" in said
    assert "+0.5000 [0.5000, 0.5000] worse" in said
    assert "Worse in NLL (log loss) than one on test data: accuracy 0.0000" in said
    assert "Scores with 95% intervals" in [image["alt"] for image in images(text)]


def against(gap):
    """Parts of a run whose model differs from the plain one by so much, with an error of 0.02."""
    results = {**runs.results(), "against": {"plain": {"nll": gap, "error": 0.02}}}
    return {"config": runs.config("mnist", "vardrop fit mnist"), "results": results}


# A run without a test part, and one whose headline is undefined.
HELD_OUT = {"task": "classification", "metrics": {}, "held_out": runs.results()["held_out"]}
SCORED = {"balanced_accuracy": None, "accuracy": 1.0}
UNDEFINED = {
    "task": "classification",
    "metrics": SCORED,
    "baseline": {"name": "majority", **SCORED},
}
SAID = [
    (against(-0.1), "Better than"), (against(0.1), "Worse than"), (against(0.03), "No clear difference"),
    ({"results": HELD_OUT}, "Accuracy 0.9900 on held-out examples; plain model: 0.9880; most frequent"),
    ({"results": HELD_OUT}, "this model plain model most frequent class NLL (log loss)"),
    ({"results": UNDEFINED}, "Balanced accuracy undefined on test data; most frequent class: undefined."),
    ({"config": {**MINIMAL, "settings": {"epochs": 9}}, "history": list(runs.history(3))}, "a was stopped after 3 of 9 epochs."),
]  # fmt: skip


@pytest.mark.parametrize("parts, text", SAID)
def test_the_page_says(tmp_path, parts, text):
    assert text in said(tmp_path, **parts)


RULES = [
    ("accuracy", Estimate(0.1, 0.04), "better"),
    ("accuracy", Estimate(0.1, 0.06), ""),
    ("nll", Estimate(0.1, 0.01, 0.08, 0.12), "worse"),
    ("nll", Estimate(0.1, 0.01, -0.08, 0.28), ""),  # few seeds
    ("coverage95", Estimate(0.1, 0.01), ""),
    ("mine", Estimate(0.1, 0.01), ""),
    ("nll", Estimate(0.1), ""),
]


def test_the_rule_of_comparisons():
    assert [judge_difference(*rule[:2]) for rule in RULES] == [rule[2] for rule in RULES]


def test_curves_of_training_and_validation_are_in_one_unit(tmp_path):
    run = runs.regression(tmp_path / "a")
    write_json(run / "preprocessing.json", with_checksum({"target": "price", "target_std": 20.0}))
    stored = read_run(run)
    ((_, ax),) = DRAW["Training curves"](stored)
    strip = ax.child_axes[0]
    expected = [row["nll"] + math.log(20.0) for row in stored.history]
    assert strip.lines[0].get_ydata().tolist() == pytest.approx(expected)


def test_nothing_is_fetched(whole):
    for _, attrs in Tags(whole).found:
        for name in ("src", "href"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?:|url\(|@import|<script", re.sub(r"base64,[^\"]*", "", whole))


def test_pictures_of_several_runs_are_in_order(tmp_path):
    pair = [runs.write(tmp_path / n, config=MINIMAL, history=list(runs.history(3))) for n in "ab"]
    text = page([*pair, runs.regression(tmp_path / "houses")], out=tmp_path / "new" / "all.html")
    alts = [image["alt"] for image in images(text)]
    curves = [alt for alt in alts if alt.startswith("Training curves")]
    assert [alt.split()[-1] for alt in curves] == ["a.", "b.", "houses."]
    assert sum(alt.startswith("Prediction interval") for alt in alts) == 1


def test_many_runs_have_a_short_title_and_those_of_one_name_their_path(tmp_path):
    many = [runs.write(tmp_path / f"{i}" / "a", config=MINIMAL) for i in range(5)]
    assert "</small>5 runs</h1>" in page(many, out=tmp_path / "r.html")
    text = page(many[:2], out=tmp_path / "r.html")
    assert all(f"<h3>{path}</h3>" in text for path in many[:2])


def test_a_run_without_results_has_a_page(tmp_path):
    text = page([runs.write(tmp_path / "a", config=MINIMAL)])
    assert images(text) == []
    assert "Not evaluated yet Try `vardrop evaluate`." in words(text)


def test_everything_from_files_is_escaped(tmp_path):
    evil = '</td><script>alert("x")</script><img src=x onerror=alert(1)>'
    found = {**runs.results(), "metrics": {evil: 0.5}, "ood": {evil: {evil: 0.5}}, "notes": [evil]}
    method = {"type": evil, evil: evil}
    config = {evil: evil, "command": evil, "method": method, "classes": [evil] * 10}
    arrays = {f"weight.{evil}": torch.randn(3, 3), "entropy_in": torch.rand(5)}
    arrays[f"entropy_out_{evil}"] = torch.rand(5)
    text = page([runs.write(tmp_path / "<b>&'\"", config=config, results=found, arrays=arrays)])
    tags = Tags(text).found
    assert [tag for tag, _ in tags].count("script") == 0
    assert all("onerror" not in attrs and attrs.get("src") != "x" for _, attrs in tags)
    assert "<b>&'" not in text
    assert "&lt;script&gt;alert" in text


@pytest.mark.parametrize("file, damaged, message", [
    ("config.json", None, "config.json"), ("results.json", b"3", "results.json.*int"),
    ("config.json", b"[]", "config.json.*got list"), ("config.json", b"\xff\xfe", "config.json"),
    ("history.jsonl", b"no\n" * 2, "history.jsonl.* in line 1"),
    ("arrays.safetensors", b"x" * 100, "arrays.safetensors to be a safetensors file"),
])  # fmt: skip
def test_a_broken_run_is_named(tmp_path, file, damaged, message):
    parts = {"history": list(runs.history(2)), "results": {}, "arrays": {"x": torch.zeros(100)}}
    run = runs.write(tmp_path / "a", config=MINIMAL, **parts)
    (run / file).unlink() if damaged is None else (run / file).write_bytes(damaged)
    assert_refused(f"{run}.*{message}", report, [run])
    assert not (run / "report.html").exists()


def test_no_run_and_no_file_are_errors(tmp_path):
    assert_refused("`run_directories` to name at least one run", report, [])
    assert_refused(r"File not found: .*nowhere/config\.json", report, [tmp_path / "nowhere"])
    run = runs.write(tmp_path / "a", config=MINIMAL)
    assert_refused("but got: Is a directory", report, [run], out=tmp_path)
