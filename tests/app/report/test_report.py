"""The report as a file: complete, self-contained, escaped, and clear about broken runs."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from tests.app.report import runs
from vardrop._core.errors import VardropError
from vardrop._core.files import sealed, write_json, write_tensors
from vardrop.app.report import read_run, report
from vardrop.app.report.gallery import KINDS
from vardrop.app.report.score_texts import MEANINGS
from vardrop.app.report.summary import method_name
from vardrop.recipes import METHODS

MINIMAL = {"command": "vardrop fit digits"}


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = runs.classification(tmp_path_factory.mktemp("runs") / "a")
    path = report([run])
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_whole_run_shows_everything(whole):
    text = whole
    titles = [kind.title for kind in KINDS if kind.task != "regression"]
    assert all(any(image["alt"].startswith(t) for image in images(text)) for t in titles)
    for shown in ("<span>--method</span> <span>sparse_vd</span>", "torch 2.13.0", "9fb629c4189551a2d022fa330f9573f3",
                  "AdditiveGaussian(log_sigma2=-8)", "0.9912", "30 epochs", "load_run("):  # fmt: skip
        assert shown in text
    assert "Left out" not in text


def words(text):
    """A page as it is read, without its tags."""
    return " ".join(
        re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", text)).split()
    )


def test_what_to_decide_by_comes_first(whole):
    said = words(whole)
    told = [
        "Predicts a class of mnist, one of 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)",
        "by the net lenet5 trained on 54,000 rows with the method sparse_vd (posterior log_sigma2=-8)",
        "How good: Accuracy 0.9912 Fraction of rows whose most probable class is right; higher is",
        "The most frequent class alone: 0.1135. 400 test rows leave open 0.976 to 0.997.",
        "How sure: Calibration error (ECE) 0.0043",
        "Against the plain net better On held-out rows: NLL (log loss) 0.0355, plain 0.0411; accuracy",
        "The NLLs differ by 0.0056 \N{PLUS-MINUS SIGN} 0.0021.",
        "The test part has no row of class 7",
        "On test data this net most frequent class accuracy",
        "On held-out rows Rows of the training data",
        "this net plain net most frequent class NLL (log loss)",
        "By class",
        "Confusions",
        "Reliability Dots on the diagonal",
        "Training curves NLL per example",
        "9fb629c4189551a2d022fa330f9573f3",
    ]
    places = [said.index(text) for text in told]
    assert places == sorted(places)


def test_every_score_says_what_it_means_and_where_it_should_go(whole):
    said = words(whole)
    for name in ("accuracy", "nll", "ece", "brier"):
        assert (
            f"{MEANINGS[name].title} {MEANINGS[name].text}; {MEANINGS[name].better} is better"
            in said
        )


@pytest.mark.parametrize("threshold", [-4.98, 3.0, None])
def test_the_caption_of_log_alpha_is_true_at_every_threshold(tmp_path, threshold):
    found = runs.results()
    found["compression"]["threshold"] = threshold
    g = torch.Generator().manual_seed(0)
    arrays = {f"{n}.1": torch.randn(3, 3, generator=g) for n in ("log_alpha", "weight_pruned")}
    said = words(page([runs.write(tmp_path / "a", config=MINIMAL, results=found, arrays=arrays)]))
    assert "mostly noise" not in said
    limit = 3.0 if threshold is None else threshold
    done = "would be removed by the usual rule" if threshold is None else "were removed"
    assert f"with alpha above {math.exp(limit):.2g}, {done}." in said
    assert ("removes weights that are larger than their noise" in said) == (limit < 0)


def test_noise_that_removes_nothing_has_no_threshold(tmp_path):
    arrays = {"log_alpha.1.gate": torch.linspace(-2, 9, 30)}
    run = runs.write(tmp_path / "a", config=MINIMAL, results=runs.results(), arrays=arrays)
    said = words(page([run]))
    assert "The method removes nothing by it." in said
    assert "removed by the usual rule" not in said
    ax = next(k for k in KINDS if k.title == "log alpha by layer").of(read_run(run))[""]
    assert ax.get_title(loc="left") == ""
    assert len(ax.lines) == 0


@pytest.mark.parametrize(
    ("wide", "verdict"), [(9, "wider than it needs"), (1, "too narrow"), (2, "keeps its promise")]
)
def test_the_interval_says_level_target_and_whether_it_holds(tmp_path, wide, verdict):
    run = runs.regression(tmp_path / "a", wide=wide)
    said = words(page([run]))
    assert "The interval promises to hold 95% of new rows, and holds" in said
    assert verdict in said
    assert "Predicts &#39;price&#39; of houses.csv" in said
    ax = next(k for k in KINDS if k.title == "Interval of prediction").of(read_run(run))[""]
    assert ax.get_ylabel() == "price"


def test_layers_that_are_numbers_have_their_kind(tmp_path):
    layers = [
        {"name": "0", "kind": "Conv2d", "weights": 9},
        {"name": "fc", "kind": "Linear", "weights": 4},
    ]
    run = read_run(runs.write(tmp_path / "a", config=MINIMAL, results={"layers": layers}))
    assert [run.label(n) for n in ("0", "fc", "3")] == ["Conv2d 0", "fc", "layer 3"]


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_called_by_their_name(name):
    from vardrop._core.values import to_json

    assert method_name(to_json(METHODS[name]())) == name


def test_what_runs_share_is_said_once_and_the_rest_is_a_table(tmp_path):
    pair = []
    for name, seed in (("a", 0), ("b", 1)):
        settings = {"epochs": 30, "lr": 0.01, "seed": seed}
        pair.append(runs.write(tmp_path / name, config={**MINIMAL, "settings": settings}))
    said = words(page(pair, out=tmp_path / "r.html"))
    assert said.count("epochs 30, lr 0.01") == 1
    assert "What differs a b settings seed 0 1" in said


def test_runs_stand_in_columns_and_share_a_baseline(tmp_path):
    config, results = runs.config("mnist", "vardrop fit mnist"), runs.results()
    pair = [runs.write(tmp_path / n, config=config, results=results) for n in ("one", "two")]
    said = words(page(pair, out=tmp_path / "r.html"))
    assert "Side by side one two How good: Accuracy 0.9912 0.9912" in said
    assert "On test data one two most frequent class accuracy" in said
    assert "On held-out rows" in said
    assert "one two plain net most frequent class NLL (log loss)" in said


def test_uneven_classes_have_no_accuracy_as_headline(tmp_path):
    found = {
        "task": "classification",
        "metrics": {"balanced_accuracy": None, "auroc": None, "accuracy": 1.0},
        "baseline": {"name": "majority", "balanced_accuracy": None, "auroc": None, "accuracy": 1.0},
    }
    said = words(page([runs.write(tmp_path / "a", config=MINIMAL, results=found)]))
    assert "How good: Balanced accuracy undefined" in said
    assert "Accuracy, which is easy here: 1.0000, and 1.0000 by that class alone." in said
    assert "How good: Accuracy" not in said


@pytest.mark.parametrize(
    ("gap", "word"), [(-0.1, "better"), (0.1, "worse"), (0.03, "no clear difference")]
)
def test_the_plain_net_is_told_from_noise(tmp_path, gap, word):
    found = {**runs.results(), "against": {"plain": {"nll": gap, "error": 0.02}}}
    said = words(page([runs.write(tmp_path / "a", config=MINIMAL, results=found)]))
    assert f"Against the plain net {word} On held-out rows" in said


def test_without_a_test_part_held_out_rows_are_the_headline(tmp_path):
    found = {"task": "classification", "metrics": {}, "held_out": runs.results()["held_out"]}
    said = words(page([runs.write(tmp_path / "a", config=MINIMAL, results=found)]))
    assert "How good on held-out rows: Accuracy 0.9900" in said
    assert "The most frequent class alone: 0.1100." in said


def test_images_are_labelled(whole, tmp_path):
    run = read_run(runs.classification(tmp_path / "a"))
    ax = next(k for k in KINDS if k.photo).of(run)[""]
    assert [panel.texts[0].get_text() for panel in ax.child_axes] == ["4\n100%", "9\nas 8, 41%"]


def test_curves_of_training_and_validation_are_in_one_unit(tmp_path):
    run = runs.regression(tmp_path / "a")
    write_json(run / "preprocessing.json", sealed({"target": "price", "target_std": 20.0}))
    config = json.loads((run / "config.json").read_text())
    stored = dataclasses.replace(read_run(run), config={**config, "version": 3})
    strip = next(k for k in KINDS if k.title == "Training curves").of(stored)[""].child_axes[0]
    expected = [row["nll"] + math.log(20.0) for row in stored.history]
    assert strip.lines[0].get_ydata().tolist() == pytest.approx(expected)


def test_nothing_is_fetched(whole):
    for _, attrs in Tags(whole).found:
        for name in ("src", "href"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?:|url\(|@import", re.sub(r"base64,[^\"]*", "", whole))


def test_several_runs_stand_side_by_side(tmp_path):
    pair = [runs.write(tmp_path / n, config=MINIMAL, history=list(runs.history(3))) for n in "ab"]
    text = page([*pair, runs.regression(tmp_path / "houses")], out=tmp_path / "new" / "all.html")
    alts = [image["alt"] for image in images(text)]
    curves = [alt for alt in alts if alt.startswith("Training curves")]
    assert [alt.split()[-1] for alt in curves] == ["a.", "b.", "houses."]
    assert sum(alt.startswith("Interval of prediction") for alt in alts) == 1
    assert "--columns: 3" in text


def test_many_runs_have_one_title_and_say_once_what_they_predict(tmp_path):
    names = [f"seed-{i}" for i in range(5)]
    many = [runs.write(tmp_path / n, config=MINIMAL) for n in names]
    text = page([*many, runs.regression(tmp_path / "houses")], out=tmp_path / "r.html")
    assert "</small>6 runs</h1>" in text
    assert f"<b>{', '.join(names)}</b>: Predicts" in text
    assert "<b>houses</b>: Predicts" in text
    assert text.count("Predicts ") == 2


def test_layers_keep_the_order_of_the_net(tmp_path):
    run = read_run(runs.classification(tmp_path / "a"))
    assert list(run.layers("weight")) == list(runs.LAYERS)


def test_runs_of_one_name_are_told_apart_by_path(tmp_path):
    pair = [runs.write(tmp_path / folder / "a", config=MINIMAL) for folder in "xy"]
    text = page(pair, out=tmp_path / "r.html")
    assert f"<b>{pair[0]}, {pair[1]}</b>:" in text


def test_missing_pieces_are_left_out_with_a_sentence(tmp_path):
    text = page([runs.write(tmp_path / "a", config=MINIMAL)])
    assert images(text) == []
    assert "On test data: the runs hold no such results." in text
    assert "Left out for want of data: Training curves; log alpha by layer;" in text


def test_a_regression_run_is_not_told_off_for_want_of_classes(tmp_path):
    text = page([runs.regression(tmp_path / "houses")])
    assert "Reliability" not in text
    assert any(i["alt"].startswith("Interval of prediction") for i in images(text))


def test_everything_from_files_is_escaped(tmp_path):
    evil = '</td><script>alert("x")</script><img src=x onerror=alert(1)>'
    found = runs.results()
    found["metrics"] = {evil: evil}
    found["ood"] = {evil: {evil: 0.5}}
    found["compression"] = {evil: 1, "layers": [{evil: evil}]}
    config = {evil: evil, "command": evil, "method": {"type": evil, evil: evil}}
    g = torch.Generator().manual_seed(0)
    arrays = {
        f"weight.{evil}": torch.randn(3, 3, generator=g),
        f"log_alpha.{evil}": torch.randn(3, 3, generator=g),
        "entropy_in": torch.rand(5, generator=g),
        f"entropy_out_{evil}": torch.rand(5, generator=g),
    }
    where = tmp_path / "<b>&'\""
    text = page([runs.write(where, config=config, results=found, arrays=arrays)])
    tags = Tags(text).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert all("onerror" not in attrs and attrs.get("src") != "x" for _, attrs in tags)
    assert "<b>&'" not in text
    assert "&lt;script&gt;alert" in text


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    run = runs.write(tmp_path / "a", config=MINIMAL, history=list(runs.history(3)))
    with open(run / "history.jsonl", "a") as file:
        file.write('{"epoch": 3, "nl')
    assert len(read_run(run).history) == 3


def test_a_score_that_is_not_a_number_can_be_shown(tmp_path):
    found = {"task": "classification", "metrics": {"nll": float("nan"), "ece": None}}
    text = page([runs.write(tmp_path / "a", config=MINIMAL, results=found)])
    assert '<td class="number" data-value="nan">undefined</td>' in text


def _cut(run):
    path = run / "arrays.safetensors"
    path.write_bytes(path.read_bytes()[:100])


BROKEN = {
    "no config": (lambda r: (r / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda r: (r / "config.json").write_text("{"), "config.json` to hold"),
    "config is a list": (lambda r: (r / "config.json").write_text("[]"), "config.json.*got list"),
    "config is binary": (lambda r: (r / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
    "results are a number": (lambda r: (r / "results.json").write_text("3"), "results.json.*int"),
    "metrics are a list": (
        lambda r: write_json(r / "results.json", sealed({"metrics": [1]})),
        "results.json` to hold `metrics` as a JSON dict",
    ),
    "history": (
        lambda r: (r / "history.jsonl").write_text(json.dumps(sealed({"epoch": 0})) + "\nno\n"),
        "history.jsonl.* in line 2",
    ),
    "history row": (lambda r: (r / "history.jsonl").write_text("[]\n"), "history.jsonl.*line 1"),
    "arrays": (_cut, "arrays.safetensors to be a safetensors file"),
    "curve": (
        lambda r: write_json(r / "results.json", sealed({"curve": [{"x": 1}]})),
        "Score against sparsity",
    ),
    "labels": (
        lambda r: write_tensors(
            r / "arrays.safetensors", {"probs": torch.eye(3), "labels": torch.zeros(2).long()}
        ),
        "Reliability.*one label per row",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_run_is_named(tmp_path, case):
    damage, message = BROKEN[case]
    run = runs.write(
        tmp_path / "a",
        config=MINIMAL,
        history=list(runs.history(2)),
        results=json.loads("{}"),
        arrays={"entropy_in": torch.zeros(100)},
    )
    damage(run)
    with pytest.raises(VardropError, match=message) as caught:
        report([run])
    assert str(run) in str(caught.value)
    assert not (run / "report.html").exists()


def test_no_run_and_no_file_are_errors(tmp_path):
    with pytest.raises(VardropError, match="`run_directories` to name at least one run"):
        report([])
    with pytest.raises(VardropError, match=r"got no file .*nowhere/config\.json"):
        report([tmp_path / "nowhere"])
    run = runs.write(tmp_path / "a", config=MINIMAL)
    with pytest.raises(VardropError, match="`out` to be a file"):
        report([run], out=tmp_path)
