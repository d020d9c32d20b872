"""Every function that a description may name, on a few small images: figures, seeds, generators."""

import inspect
import math

import pytest
import torch
from sklearn.datasets import load_digits

from experiments import havasi, random_code, text, trainings, uci
from experiments.command import FUNCTIONS
from experiments.trainings import Watch
from tests.pairs import slow_but
from vardrop.app.data import Images

TINY = {
    "kl_approximations": {},
    "gradient_variances": {"epochs": 2, "width": 8, "batch": 20, "batches": 4, "example_batches": 4, "examples": 80},
    "epoch_seconds": {"width": 8, "batch": 20, "small_batch": 5, "rows": 40},
    "width_errors": {"width": 8, "epochs": 2, "examples": 60},
    "averaged_errors": {"width": 8, "epochs": 3, "examples": 60},
    "sparse_mnist": {"epochs": 2, "decay_from": 1, "warmup": [], "pretrain": 1, "examples": 60, "lower": [2, 1], "held_out": 20},
    "random_labels": {"epochs": 1, "dropout_epochs": 1, "examples": 60, "width": 8},
    "sparse_units": {"dense_epochs": 1, "epochs": 1, "dependent_epochs": 1, "examples": 60},
    "class_heads": {"per_class": 3, "epochs": 1},
    "plain_levels": {"width": 8, "epochs": 1, "examples": 60},
    "gain_by_count": {"counts": [3, 4], "steps": 2, "held_out": 20},
    "variance_lenet5": {"epochs": 2, "samples": 2, "examples": 60},
    "parameterisation": {"prior": "ard", "samples": 2, "examples": 60, "epochs": 2, "bottleneck": 8, "width": 8},
    "selective_propagation": {"epochs": 2, "samples": 2, "examples": 60, "shares": [0.0, 0.5, 1.0]},
    "attacks": {"epochs": 1, "samples": 2, "examples": 60, "epsilons": [0.0, 0.1]},
    "exploration": {"episodes": 4, "window": 2}, "variance_toys": {"steps": 3},
    "shifted_digits": {"epochs": 1, "samples": 2, "examples": 60, "tested": 20, "members": 2, "strengths": [2], "angles": [0, 90]},
    "noise_tolerance": {"epochs": 1, "alphas": [1.0], "examples": 60, "samples": 2}, "identity": {},
    "toy": {"epochs": 3, "draws": 4},
    "packed_bytes": {"knots": [[0, 1.0], [2, 0.0]], "warmup": [0, 1], "validation": 40},
    "fewer_channels": {"knots": [[0, 1.0], [2, 0.0]], "channel_knots": [[0, 1.0], [1, 0.0]], "warmup": [0, 1], "fine_tune_epochs": 1, "validation": 40},
    "coded_bytes": {"sizes": [2, 3, 4], "bits": 200, "block_bits": 6, "epochs": 2, "coding_epochs": 2, "batch": 20, "validation": 40},
    "slim_beside_others": {"examples": 80, "dense_epochs": 1, "epochs": 2, "fractions": [0.5], "peer": False, "ways": []},
    "narrow_cifar": {"dense_epochs": 1, "epochs": 1, "examples": 60, "tests": 20, "samples": 2, "methods": ["trained on", "sparse VD", "Beta-Bernoulli", "variance layer", "DropMax"], "epsilons": [0.0, 0.1]},
    "score_gap": {"tables": ["few"], "steps": 4, "samples": 2, "members": 2},
    "tuned_resnet": {"examples": 80, "dense_epochs": 1, "epochs": 1, "samples": 2, "members": 2, "tested": 40, "validated": 20},
    "character_lstm": {"width": 8, "length": 10, "epochs": 2, "warmup": [0, 1]},
    "smaller_transformer": {"width": 8, "heads": 2, "feed": 16, "layers": 1, "length": 6, "epochs": 1, "gate_epochs": 2, "penalties": [0.01, 100.0], "timed": []},
    "defaults": {"table": "iris", "epochs": 1},
    "standard_splits": {"table": "few", "steps": 10, "batch": 16, "hidden": 4, "samples": 4, "members": 2},
    "compare_estimators": {"model": "lstm", "rates": [0.01], "examples": 60, "validated": 20, "tested": 20, "epochs": 1, "samples": 2},
    "tuned_digits": {"epochs": 2, "samples": 2, "examples": 60, "validated": 20, "tested": 20, "members": 2, "strengths": [2], "angles": [90]},
    "slim_against_simple": {"examples": 80, "validated": 40, "dense_epochs": 1, "epochs": 2, "narrow_epochs": 2, "rates": [0.01], "fractions": [0.5]},
    "slim_cnns": {"kinds": ["U-Net"], "timed": ["MobileNet"], "examples": 80, "validated": 40, "dense_epochs": 1, "epochs": 2, "fractions": [0.5], "runtimes": ["torch"]},
    "compare_packing": {"epochs": 2, "examples": 60, "validation": 40, "thresholds": [3.0], "keeps": [0.1], "tolerances": [1.0], "limits": [90.0]},
    "tuned_heads": {"per_class": 3, "validated": 20, "epochs": 1, "rows": ["label smoothing", "DropMax"]},
    "line_fits": {"counts": [10, 40], "width": 8, "steps": 20, "draws": 3},
}  # fmt: skip


def few_images(name: str, split: str = "train") -> Images:
    raw = load_digits()
    x = torch.tensor(raw.images[:120], dtype=torch.float32)[:, None] / 16
    return Images(torch.nn.functional.interpolate(x, (28, 28)), torch.tensor(raw.target[:120]))


def few_words(file: str) -> str:
    """Half a page of letters, or sentences of which the first word tells the class."""
    if not file.startswith("sst2"):
        return "to be or not to be\n" * 60
    return "".join(f"{i % 2} {['bad', 'good'][i % 2]} film {i % 7} .\n" for i in range(60))


def few_rows(name: str):
    """120 rows of a noisy plane, one of three columns without meaning, and two splits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator, dtype=torch.float64)
    y = 5 + x[:, :1] - 2 * x[:, 1:2] + 0.1 * torch.randn(120, 1, generator=generator)
    return x, y, [[1, 5, 9, 30], [0, 2, 22, 39]]


def measured(name, seed, **more):
    """What a function finds for one seed."""
    if "seeds" in inspect.signature(FUNCTIONS[name]).parameters:
        (found,) = FUNCTIONS[name](seeds=[seed], **TINY[name], **more)
        return found
    return FUNCTIONS[name](seed=seed, **TINY[name], **more)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(uci, "split_table", few_rows)
    monkeypatch.setattr(trainings, "load_images", few_images)
    monkeypatch.setattr(text, "read_text", few_words)


def test_the_table_is_complete():
    assert set(TINY) == set(FUNCTIONS) - {"compare_demo"}  # tests/app/test_demo.py


@pytest.mark.filterwarnings("ignore:The NLL on `validation`")
@pytest.mark.parametrize("name", TINY)
def test_measures_finite_figures_and_leaves_the_generator(name, few):
    if name == "exploration":
        pytest.importorskip("gymnasium", reason="needs the extra `rl`")
    before, found = torch.get_rng_state(), measured(name, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found["figures"]
    assert all(type(v) is float and math.isfinite(v) for v in found["figures"].values())
    assert all(isinstance(record, dict) for record in found.get("curve", []))


def test_a_seed_decides_the_figures(few):
    arguments = TINY["sparse_units"] | {"dependent_epochs": 0}
    first, again, other = (FUNCTIONS["sparse_units"](seed=s, **arguments) for s in (1, 1, 2))
    assert first == again
    assert first["curve"] != other["curve"]


class Cut(Exception):
    """Somebody stops the run."""


WATCHED = [n for n, f in FUNCTIONS.items() if "watch" in inspect.signature(f).parameters]
ALWAYS = ("width_errors", "sparse_mnist", "sparse_units", "coded_bytes", "character_lstm")


@pytest.mark.parametrize("name", slow_but(WATCHED, *ALWAYS))
def test_a_run_that_was_cut_off_has_the_figures_of_a_whole_one(name, few, tmp_path, monkeypatch):
    read_here = lambda path, net: random_code.read_code(path, havasi.full_net(net))
    monkeypatch.setattr(havasi, "_read_elsewhere", read_here)  # not in another process
    told = []

    def cut(fraction, text):
        told.append(text)
        if len(told) == 2:  # after its first checkpoint
            raise Cut

    with pytest.raises(Cut):
        measured(name, 1, watch=Watch(tmp_path, cut, seconds=0.0))
    assert [*tmp_path.glob("*/checkpoint.safetensors"), *tmp_path.glob("*.json")]
    again = []
    watch = Watch(tmp_path, lambda fraction, text: again.append(text), seconds=0.0)
    found, whole = measured(name, 1, watch=watch), measured(name, 1)
    assert told[0] not in again  # it went on
    for result in (found, whole):
        for record in result.get("curve", ()):
            record.pop("kl", None)  # `kl_value_every` counts its steps again
        figures = result["figures"].items()
        result["figures"] = {key: value for key, value in figures if "seconds" not in key}
    assert found == whole
