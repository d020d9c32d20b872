"""Public verbs called with wrong arguments: a clear error, or a right result.

Hypothesis picks a verb, one of its arguments and a value of a wrong type, shape, dtype or device,
with NaN or without examples. An error must be a `VardropError`, or a `TypeError` or `ValueError`
with the name of the argument, and it leaves the model unchanged. Some values are fine for some
arguments, so a call may also succeed.
"""

import contextlib
import inspect
import re
import tempfile
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import nn

import vardrop as vd
from tests.nets import is_equal
from vardrop import divergence, layers, recipes
from vardrop.app.data import datasets
from vardrop.likelihoods import Likelihood

X, Y = torch.randn(6, 4), torch.arange(6) % 3
FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["a", "b"])
FRAME["y"] = ["p", "q"] * 15
NAN = float("nan")

WRONG = {
    "None": lambda: None, "a text": lambda: "text", "an empty text": lambda: "", "a path": lambda: "/nowhere/x", "bytes": lambda: b"x",
    "a float": lambda: 3.7, "-1": lambda: -1, "0": lambda: 0, "a large integer": lambda: 2**70, "a small integer": lambda: -(2**70),
    "NaN": lambda: NAN, "infinity": lambda: float("inf"), "True": lambda: True, "a complex number": lambda: 1j,
    "an empty list": lambda: [], "an empty tuple": lambda: (), "an empty dictionary": lambda: {}, "a list of texts": lambda: ["a"],
    "nested lists": lambda: [[1.0, 2.0]], "a dictionary": lambda: {"x": 1}, "a set": lambda: {1}, "an object": lambda: object(),
    "an array": lambda: X.numpy(), "an array of texts": lambda: np.array(["a", "b"]), "a scalar array": lambda: np.array(1),
    "a DataFrame": lambda: FRAME, "a Series": lambda: FRAME["a"], "an iterator": lambda: iter([]), "a class": lambda: nn.Linear,
    "a function": lambda: abs, "a module": lambda: nn.Linear(2, 2), "a recurrent module": lambda: nn.LSTM(2, 2),
    "a module without parameters": lambda: nn.ReLU(), "a recipe": lambda: vd.ard(), "a posterior": lambda: vd.ZeroMean(),
    "a generator": lambda: torch.Generator(), "a dtype": lambda: torch.float32, "a device": lambda: torch.device("cpu"),
    "a tensor without axes": lambda: torch.tensor(1.0), "a tensor of another shape": lambda: torch.randn(2, 3, 5),
    "a tensor without examples": lambda: X[:0], "a tensor of integers": lambda: Y, "a tensor of NaN": lambda: X * NAN,
    "a tensor of infinities": lambda: X / 0, "a complex tensor": lambda: X + 0j, "a tensor of bools": lambda: X > 0,
    "a tensor in half precision": lambda: X.half(), "a tensor in double precision": lambda: X.double(),
    "a tensor on the meta device": lambda: X.to("meta"), "a sparse tensor": lambda: X.to_sparse(),
    "a pair of different lengths": lambda: (X, Y[:2]), "a pair of lists": lambda: ([1.0], [0]),
    "a pair of arrays": lambda: (X.numpy(), Y.numpy()), "negative targets": lambda: (X, Y - 5),
    "targets of NaN": lambda: (X, X * NAN), "a triple": lambda: (X, Y, Y), "a list of pairs": lambda: [(1, 2), (3, 4)],
}  # fmt: skip


def plain():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def noisy():
    return vd.convert(plain(), vd.sparse_vd())


def elbo():
    return vd.ELBO(noisy(), vd.Categorical(), num_data=6)


def prediction():
    return vd.predict(noisy(), X, samples=2, seed=0)


def written(write, net, path):
    write(net, path)
    return path


MINE = type("Mine", (nn.Linear,), {})
PAIR, CLASSES = (X, Y), vd.Categorical()
Q, P = vd.AdditiveGaussian(), vd.Normal()
SLIM = {"macs": 0.9, "epochs": 1, "runtimes": ["torch"], "progress": False}
FIT = {"epochs": 1, "folds": 1, "compare": False, "progress": False, "batch_size": 10}


# Each public verb, and arguments with which it succeeds.
VERBS = {
    "alpha_summary": (vd.alpha_summary, lambda folder: {"net": noisy(), "threshold": 3.0}),
    "apply_temperature": (vd.apply_temperature, lambda folder: {"probs": X.softmax(1), "temperature": 2.0}),
    "calibrate": (vd.calibrate, lambda folder: {"net": noisy(), "data": PAIR, "likelihood": CLASSES, "samples": 2, "seed": 0, "progress": False}),
    "choose_threshold": (vd.choose_threshold, lambda folder: {"net": noisy(), "data": PAIR, "metric": lambda output, y: (output.argmax(1) == y).float().mean(), "max_drop": 0.5, "points": 2, "progress": False}),
    "compare_methods": (vd.compare_methods, lambda folder: dict(data="iris", recipes=["none"], seeds=1, net="mlp50", out=folder / "c", **FIT)),
    "compare_runs": (vd.compare_runs, lambda folder: {"runs": [folder / "run", folder / "other"]}),
    "compile": (vd.compile, lambda folder: {"elbo": elbo(), "optimizer": torch.optim.SGD(elbo().parameters(), 0.1)}),
    "conformal": (vd.conformal, lambda folder: {"p": prediction(), "y": Y, "level": 0.5}),
    "constant": (vd.constant, lambda folder: {"beta": 0.5}),
    "convert": (vd.convert, lambda folder: {"net": plain(), "recipe": vd.l0(), "include": "*", "exclude": "2"}),
    "cyclical": (vd.cyclical, lambda folder: {"period": 5, "rise": 0.5, "beta": 1.0}),
    "distil": (vd.distil, lambda folder: {"net": noisy(), "data": X, "student": plain(), "epochs": 1, "samples": 2, "temperature": 1.0, "likelihood": CLASSES, "seed": 0, "progress": False}),
    "draw": (vd.draw, lambda folder: {"net": noisy(), "seed": 0}),
    "draws": (lambda **k: list(vd.draws(**k)), lambda folder: {"net": noisy(), "samples": 2, "seed": 0}),
    "export_onnx": (vd.export_onnx, lambda folder: {"net": plain(), "example_input": X, "path": folder / "a.onnx", "outputs": None, "noise": "runtime"}),
    "export_program": (vd.export_program, lambda folder: {"net": plain(), "example_input": X, "outputs": None, "noise": "runtime"}),
    "fit": (vd.fit, lambda folder: dict(data=FRAME, net="mlp50", recipe="l0", out=folder / "f", target="y", task="classification", drop=(), validation=FRAME, test=False, include="*", exclude="1", force=True, callback=None, lr=0.01, beta=0.1, seed=0, **FIT)),
    "fine_tune": (vd.fine_tune, lambda folder: {"net": noisy(), "data": [PAIR], "epochs": 1, "likelihood": CLASSES, "validation": PAIR, "beta": 0.5, "lr": 0.01, "progress": False}),
    "fine_tune plain": (vd.fine_tune, lambda folder: {"net": (net := plain()), "data": [PAIR], "epochs": 1, "loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD(net.parameters(), 0.1), "progress": False}),
    "fit_temperature": (vd.fit_temperature, lambda folder: {"p": prediction(), "y": Y}),
    "freeze": (vd.freeze, lambda folder: {"net": noisy(), "samples": 2, "mode": "sample", "draw": "local", "likelihood": CLASSES, "conformal": None, "level": 0.5, "memory": 2**20, "output": None}),
    "from_json": (vd.from_json, lambda folder: {"data": vd.to_json(vd.ard())}),
    "kappa": (vd.kappa, lambda folder: {"net": noisy(), "data": PAIR, "probes": 2, "samples": 2, "seed": 0}),
    "kl": (vd.kl, lambda folder: {"net": noisy(), "value": True}),
    "kl_divergence": (vd.kl_divergence, lambda folder: {"q": Q, "p": P, "weight": X, "axes": (0, 1), "q_tensors": {"log_sigma2": X - 9}, "p_tensors": {}, "value": True}),
    "linear_warmup": (vd.linear_warmup, lambda folder: {"start": 0, "end": 5, "beta": 1.0}),
    "load": (vd.load, lambda folder: {"path": written(vd.save, plain(), folder / "a.safetensors"), "into": plain()}),
    "load_dataset": (vd.load_dataset, lambda folder: {"data": FRAME, "target": "y", "task": "classification", "drop": (), "seed": 0, "validation": FRAME, "test": None}),
    "load_noisy": (vd.load_noisy, lambda folder: {"path": written(vd.save_noisy, noisy(), folder / "n.safetensors"), "into": plain()}),
    "load_run": (vd.load_run, lambda folder: {"path": folder / "run", "net": None, "directory": None}),
    "log_alpha": (vd.log_alpha, lambda folder: {"net": noisy()}),
    "pack": (vd.pack, lambda folder: {"model": plain(), "path": folder / "b.vdp", "tolerance": 1.0}),
    "parameter_groups": (vd.parameter_groups, lambda folder: {"module": noisy(), "lr": 0.1, "noise_lr": 0.1, "weight_decay": 0.0}),
    "plan": (vd.plan, lambda folder: {"net": plain(), "recipe": vd.l0(), "include": "*", "exclude": "2", "example_input": X}),
    "predict": (vd.predict, lambda folder: {"net": noisy(), "x": X, "samples": 2, "mode": "sample", "draw": "local", "likelihood": CLASSES, "seed": 0, "memory": 2**20, "tolerance": 0.1, "keep": 1, "output": None, "progress": False}),
    "predict_batches": (lambda **k: list(vd.predict_batches(**k)), lambda folder: {"net": noisy(), "x": [X], "samples": 2, "seed": 0}),
    "reestimate_batchnorm": (vd.reestimate_batchnorm, lambda folder: {"net": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "data": [X]}),
    "register_dataset": (vd.register_dataset, lambda folder: {"name": "mine", "load": lambda: PAIR}),
    "register_kl": (vd.register_kl, lambda folder: {"q_type": vd.ZeroMean, "p_type": vd.StudentT}),
    "register_layer": (vd.register_layer, lambda folder: {"plain": MINE, "noisy": type("NoisyMine", (vd.Linear, MINE), {})}),
    "register_recipe": (vd.register_recipe, lambda folder: {"name": "mine", "make": lambda: vd.ard()}),
    "relevance": (vd.relevance, lambda folder: {"net": noisy()}),
    "resume": (vd.resume, lambda folder: {"out": folder / "run", "net": None, "callback": None, "data": FRAME, "validation": None, "test": None, "epochs": 1, "progress": False}),
    "revert": (vd.revert, lambda folder: {"net": noisy()}),
    "sampling": (lambda **k: vd.sampling(**k).__enter__(), lambda folder: {"net": noisy(), "on": True}),
    "save": (vd.save, lambda folder: {"net": plain(), "path": folder / "s.safetensors"}),
    "save_noisy": (vd.save_noisy, lambda folder: {"net": noisy(), "path": folder / "s.safetensors"}),
    "shrink": (vd.shrink, lambda folder: {"net": noisy(), "example_input": X, "threshold": 3.0, "drop_inputs": False, "progress": False}),
    "slim": (vd.slim, lambda folder: dict(net=plain(), data=PAIR, validation=PAIR, lr=0.01, loss=None, multiple=1, seed=0, runtime="torch", **SLIM)),
    "sparsity": (vd.sparsity, lambda folder: {"net": noisy(), "threshold": 3.0}),
    "to_json": (vd.to_json, lambda folder: {"value": vd.ard()}),
    "unpack": (vd.unpack, lambda folder: {"path": written(vd.pack, plain(), folder / "a.vdp"), "into": plain()}),
    "ELBO": (vd.ELBO, lambda folder: {"net": noisy(), "likelihood": CLASSES, "num_data": 6, "beta": 0.5, "samples": 1, "kl_value_every": 1, "output": None}),
    "ELBO.forward": (lambda **k: elbo()(**k), lambda folder: {"x": X, "y": Y, "weight": torch.ones(6)}),
    "Ensemble": (vd.Ensemble, lambda folder: {"models": [plain(), plain()], "samples": 2, "likelihood": CLASSES}),
    "Predictor": (vd.Predictor, lambda folder: {"net": noisy(), "samples": 2, "mode": "sample", "draw": "local", "likelihood": CLASSES, "level": 0.5, "memory": 2**20, "tolerance": 0.1, "keep": 1}),
    "Predictor.forward": (lambda **k: vd.freeze(noisy(), 2)(**k), lambda folder: {"x": X, "seed": 0}),
    "Gate": (vd.Gate, lambda folder: {"noise": vd.BetaBernoulli(), "units": 3, "axis": -1, "side": "input"}),
    "Head": (vd.Head, lambda folder: {"in_features": 4, "num_classes": 3, "rule": vd.heads.DropMaxRule(), "bias": True}),
    "Gaussian": (vd.Gaussian, lambda folder: {"std": 0.5, "learned": False}),
    "Categorical": (vd.Categorical, lambda folder: {"temperature": 1.0, "class_axis": 1, "ignore_index": -100}),
    "Bernoulli": (vd.Bernoulli, lambda folder: {"temperature": 1.0}),
    "HeteroscedasticGaussian": (vd.HeteroscedasticGaussian, lambda folder: {"scale": 1.0}),
    "metrics.accuracy": (vd.metrics.accuracy, lambda folder: {"probs": X.softmax(1), "y": Y}),
    "metrics.ece": (vd.metrics.ece, lambda folder: {"probs": X.softmax(1), "y": Y, "bins": 5}),
    "metrics.nll": (vd.metrics.nll, lambda folder: {"probs": X.softmax(1), "y": Y}),
    "metrics.auroc": (vd.metrics.auroc, lambda folder: {"scores_in": X[:, 0], "scores_out": X[:, 1]}),
    "metrics.risk_coverage": (vd.metrics.risk_coverage, lambda folder: {"uncertainty": X[:, 0], "errors": X[:, 1].abs()}),
    "metrics.crps_gaussian": (vd.metrics.crps_gaussian, lambda folder: {"mean": X, "std": X.abs(), "y": X}),
    "metrics.interval_coverage": (vd.metrics.interval_coverage, lambda folder: {"y": X, "lower": X, "upper": X + 1}),
}  # fmt: skip
VERBS |= {
    name: (make, lambda folder, make=make: {p.name: p.default for p in inspect.signature(make).parameters.values()})
    for name, make in recipes.METHODS.items() if inspect.signature(make).parameters
}  # fmt: skip
# Training may end with an error after its first step, and keeps the parameters of that step.
IN_STEPS = {("distil", "data"), ("fine_tune", "lr"), ("fine_tune plain", "data")}
NO_VERBS = {"reference", *recipes.METHODS}  # no arguments, or tests of their own


@pytest.fixture(scope="module")
def folder():
    """Two runs. Relative paths among the wrong values are below it."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for run in ("run", "other"):
            vd.fit(FRAME, "mlp50", "l0", out=Path(name) / run, target="y", **FIT)
        yield Path(name)


@pytest.mark.parametrize("name", sorted(VERBS))
def test_right_arguments_succeed(folder, name):
    verb, make = VERBS[name]
    with registries():
        verb(**make(folder))


def test_every_public_function_is_called():
    functions = {n for n in vd.__all__ if isinstance(getattr(vd, n), types.FunctionType)}
    assert functions - set(VERBS) <= NO_VERBS


def snapshot(values):
    """Everything about the models among the arguments that a failed call must not change."""
    nets = [v for v in values if isinstance(v, nn.Module) and not isinstance(v, Likelihood)]
    return [
        (type(m), m.training, getattr(m, "sampling", None), [n for n, _ in m.named_parameters()],
         {k: t.clone() for k, t in m.state_dict().items() if isinstance(t, torch.Tensor)})
        for net in nets for m in net.modules()
    ]  # fmt: skip


@contextlib.contextmanager
def registries():
    """Undo registrations."""
    tables = (divergence._PAIRS, layers.NOISY_TYPES, recipes.METHODS, datasets._REGISTERED)
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(mock.patch.dict(table))

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def problem(name, arguments, kinds):
    """What is wrong with the answer to a call with wrong arguments; empty if nothing is."""
    verb, in_steps = VERBS[name][0], IN_STEPS & {(name, argument) for argument in kinds}
    with registries():
        arguments = {**arguments, **{name: WRONG[kind]() for name, kind in kinds.items()}}
        before, names = snapshot(arguments.values()), "|".join(kinds)
    try:
        with registries():
            verb(**arguments)
        return ""
    except vd.VardropError:
        wrong = ""
    except (TypeError, ValueError) as error:
        wrong = "" if re.search(rf"\b({names})\b", str(error)) else f"{error!r} without {names}"
    except Exception as error:  # any other type is a finding
        wrong = repr(error)
    if not wrong and not in_steps and not is_equal(before, snapshot(arguments.values())):
        wrong = "the model changed"
    return wrong


def call(name, folder, data, most):
    """Replace up to `most` arguments of a verb; return what is wrong with its answer."""
    arguments = VERBS[name][1](folder)
    names = st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=most, unique=True)
    kinds = {argument: data.draw(st.sampled_from(sorted(WRONG))) for argument in data.draw(names)}
    assume(not any(kinds.get(name) == "a large integer" for name in COUNTS))
    return problem(name, arguments, kinds)


COUNTS = ("epochs", "seeds")  # 2**70 of them are no mistake, but take long
OPTIONS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=600, derandomize=True, **OPTIONS)
@given(data=st.data(), name=st.sampled_from(sorted(VERBS)))
def test_a_wrong_argument_is_named(folder, data, name):
    assert call(name, folder, data, most=1) == ""


@pytest.mark.slow
@settings(max_examples=20_000, **OPTIONS)
@given(data=st.data(), name=st.sampled_from(sorted(VERBS)))
def test_wrong_arguments_are_named(folder, data, name):
    assert call(name, folder, data, most=3) == ""
