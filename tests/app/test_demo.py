"""The demo: corruptions, the choice of settings, the sentences, and one seed of all models."""

import pytest
import torch

from vardrop.app import demo
from vardrop.app.data import Images
from vardrop.app.demo import STRENGTHS, corrupt, split


def test_the_parts_of_a_split_have_no_digit_in_common():
    parts = split(4)
    assert [len(part.y) for part in parts] == [1000, 198, 599]
    assert len({tuple(x.tolist()) for part in parts for x in part.x}) == 1797


@pytest.mark.parametrize("kind", demo.KINDS)
def test_corruptions_grow_with_their_strength_and_are_repeatable(kind):
    x = split(0)[2].x
    changes = [float((corrupt(kind, x, strength) - x).square().mean()) for strength in STRENGTHS]
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert torch.equal(corrupt(kind, x, 3), corrupt(kind, x, 3))


def test_the_most_regularized_of_equal_candidates_is_chosen():
    def constant(probability):
        net = torch.nn.Linear(2, 2)
        torch.nn.init.zeros_(net.weight)
        with torch.no_grad():
            net.bias.copy_(torch.tensor([probability, 1 - probability]).log())
        return net

    data = Images(torch.zeros(100, 2), torch.tensor([0] * 50 + [1] * 50))
    candidates = [demo.Candidate(constant(p), p, 0) for p in (0.4, 0.5, 0.51, 0.9)]
    assert demo.choose(candidates, data).setting == 0.51


def test_the_table_marks_the_best_and_the_sentence_counts_seeds():
    row = {"clean acc %": 95.0, "clean NLL": 0.2, "corr. acc %": 60.0, "corr. NLL": 2.0}
    row |= {"corr. ECE": 0.2, "AUROC": 0.8, "file kB": 90.0, "train s": 1.0}
    other = row | {"corr. NLL": 1.5, "file kB": 3.0, "clean acc %": 94.5}
    scores = {"plain": [row, row], "sparse": [other, other | {"corr. NLL": 2.5}]}
    table = demo.cells(scores)
    assert table["plain"][0] == ("95.0*", "±0.0")
    assert table["sparse"][6] == ("3.0*", "±0.0")
    assert table["sparse"][3][1] == "±0.50"
    text = demo.compare(scores, "sparse", "plain")
    assert "30.0 times smaller" in text
    assert "lower in 1 of 2" in text
    assert "accuracy -0.5 points" in text


@pytest.mark.slow
def test_the_demo_shows_all_models_and_its_claims(tmp_path, capsys):
    """Claims of one seed that held for all 13 seeds of the design: NLL and file size."""
    scores = demo.main(tmp_path / "demo", seeds=[30])
    assert tuple(scores) == demo.ROWS
    plain, sparse, bayes = (scores[name][0] for name in ("plain", *demo.ROWS[-1:-3:-1]))
    assert sparse["file kB"] < plain["file kB"] / 15
    assert max(sparse["corr. NLL"], bayes["corr. NLL"]) < plain["corr. NLL"]
    assert capsys.readouterr().out.rstrip().endswith("report.html")
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000
