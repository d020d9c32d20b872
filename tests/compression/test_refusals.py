"""Calls that cannot be right: one clear error, and nothing changed by it."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused, unchanged

NAN, INF = math.nan, math.inf
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
IMAGES = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def noisy():
    return vd.convert(mlp(), vd.sparse_vd())


def two_rules():
    net = nn.Sequential(nn.Linear(4, 2), vd.Gate(vd.gates.BetaBernoulli(), units=2))
    return vd.convert(net, vd.sparse_vd(), include="0")


def small():
    return vd.shrink(noisy(), X[:1]).net


def with_weight(net, value):
    net[0].weight.data[0, 0] = value
    return net


def one(output, target):
    return 1.0


def broken(net, x):
    raise RuntimeError("the user's own words")


def magnitude():
    return Parts(lambda net, x: net.layer(x.abs()), layer=nn.Linear(4, 3))


SHRINK = [
    (None, X, {}, "Expected `net` to be a torch.nn.Module, but got None"),
    (noisy, "x", {}, "Expected `example_input` to be a tensor, .* but got 'x'"),
    (noisy, X[:0], {}, r"with at least one row, but got a tensor of shape \(0, 4\)"),
    (noisy, X * NAN, {}, "Expected `example_input` to be finite"),
    (magnitude, X + 0j, {}, "real numbers or integers, but got torch.complex64. Pass torch.view_as_real"),
    (noisy, torch.zeros(1, 9), {}, "Expected `net` to take `example_input`, but got RuntimeError"),
    (lambda: vd.convert(Parts(broken, layer=nn.Linear(4, 3)), vd.sparse_vd()), X, {}, "RuntimeError: the user's own words"),
    (lambda: with_weight(noisy(), NAN), X, {}, "to be finite, but got NaN or infinity in '0.weight'"),
    (noisy, X, {"threshold": "x"}, "Expected `threshold` to be a number .* but got 'x'"),
    (noisy, X, {"threshold": {"0": NAN}}, "Expected `threshold` to be a number .* but got nan"),
    (noisy, X, {"threshold": {"z": 1.0}}, "Expected `threshold` to name noisy modules among"),
    (mlp, X, {"threshold": 1.0}, "to have a method with a pruning rule"),
    (lambda: vd.convert(mlp(), vd.binary_dropout()), X, {"threshold": 1.0}, "to have a method with a pruning rule"),
    (two_rules, X, {"threshold": 1.0}, "Expected one threshold for modules with one rule"),
    (noisy, X, {"drop_inputs": 1}, "Expected `drop_inputs` to be True or False, but got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "x", "more", "message"), SHRINK)
def test_shrink(make, x, more, message):
    assert_refused(message, vd.shrink, make and make(), x, **more)


CHOOSE = [
    ({"sparsity": 2}, {}, "Expected `sparsity` to be a finite number and at most 1, but got 2"),
    ({"max_drop": "x"}, {}, "Expected `max_drop` to be a finite number, but got 'x'"),
    ({"points": 0, "max_drop": 0.1}, {}, "Expected `points` to be an integer of at least 1"),
    ({"max_drop": 0.1}, {"metric": lambda o, t: NAN}, "Expected `metric` to return a number"),
    ({"max_drop": 0.1}, {"metric": lambda o, t: "a"}, "to return a number, but got 'a'"),
    ({"max_drop": 0.1}, {"data": None}, "Expected `data` to be a pair"),
    ({"max_drop": 0.1}, {"data": (X[:0], Y[:0])}, "Expected `data` to have examples, but got none"),
    ({"max_drop": 0.1}, {"data": [(X,)]}, r"to give pairs \(inputs, targets\)"),
    ({"max_drop": 0.1}, {"net": None}, "Expected `net` to be a torch.nn.Module"),
    ({"max_drop": 0.1}, {"net": mlp()}, "Expected `net` to have a method with a pruning rule"),
    ({"max_drop": 0.1}, {"data": (X, Y[:3])}, "Expected inputs and targets of one length"),
    ({"max_drop": 0.1}, {"data": []}, "Expected `data` to have examples"),
    ({}, {}, "Expected one of `max_drop` and `sparsity`, but got None and None"),
    ({"max_drop": 0.1, "sparsity": 0.5}, {}, "but got 0.1 and 0.5"),
    ({"max_drop": -1.0}, {}, "Expected a threshold with `max_drop` within -1"),
]


@pytest.mark.parametrize(("budget", "more", "message"), CHOOSE)
def test_choose_threshold(budget, more, message):
    call = {"net": noisy(), "data": (X, Y), "metric": one, **more}
    assert_refused(message, vd.choose_threshold, **call, **budget)


def std(name, value):
    return {"standard_deviations": {name: value}}


WIDE = torch.ones(6, 4)
PACK = [
    (noisy, std("0.weight", WIDE), "to be plain, but got noise in '0'"),
    (small, {"tolerance": 0}, "Expected `tolerance` to be a finite number and above 0"),
    (small, {"tolerance": INF}, "Expected `tolerance` to be a finite number and above 0"),
    (small, {"tolerance": 1e-300}, r"to be within 2\^53 steps of .* Raise `tolerance`"),
    (small, {"tolerance": 1e30}, "Expected some weights of '0.weight' to survive rounding"),
    (lambda: with_weight(small(), NAN), {}, "Expected '0.weight' to hold finite numbers"),
    (lambda: with_weight(small(), 1e18), {}, r"Expected '0.weight' to be within 2\^53 steps"),
    (small, std("zz", WIDE), "Expected `standard_deviations` to name tensors"),
    (small, std("0.weight", WIDE[:2]), r"the shape \(6, 4\), but got \(2, 4\)"),
    (small, std("0.weight", 0 * WIDE), "to be positive and finite, but got 0.0"),
    (small, std("0.weight", NAN * WIDE), "to be positive and finite, but got nan"),
]


@pytest.mark.parametrize(("make", "more", "message"), PACK)
def test_pack_writes_nothing(tmp_path, make, more, message):
    net, path = make(), tmp_path / "net.vdp"
    path.write_bytes(b"what was there")
    assert_refused(message, vd.pack, vd.Shrunk(net, vd.shrink(noisy(), X[:1]).plan), path, **more)
    assert path.read_bytes() == b"what was there"
    assert [p.name for p in tmp_path.iterdir()] == ["net.vdp"]


@pytest.mark.parametrize("write", [vd.save, vd.pack])
def test_places_that_cannot_be_written(tmp_path, write):
    assert_refused("No such file", write, small(), tmp_path / "none" / "net")
    assert_refused("Expected to write .* Is a directory", write, small(), tmp_path)
    assert_refused("Expected `path` to be a path, but got 3", write, small(), 3)
    assert_refused("`net` to be a torch.nn.Module, but got None", write, None, tmp_path / "net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read", [vd.load, vd.unpack])
def test_reading_into_nothing(tmp_path, read):
    assert_refused("`into` to be a .*, but got None", read, tmp_path / "net", into=None)
    assert_refused("Expected `path` to be a path, but got None", read, None, into=mlp())


def test_onnx_and_program(tmp_path):
    refused = "Expected `net` to take `example_input`"
    assert_refused(refused, vd.export_onnx, mlp(), torch.zeros(1, 9), tmp_path / "net.onnx")
    assert_refused("Expected `example_input` to be a tensor", vd.export_program, mlp(), "x")
    assert_refused("Expected `net` to be a torch.nn.Module", vd.export_program, None, X)
    assert_refused("No such file", vd.export_onnx, mlp(), X, tmp_path / "none" / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data, message", [
    ([], "Expected `data` to give batches of inputs, but got none"),
    (None, "Expected `data` to be batches of inputs, but got None"),
    ([IMAGES * NAN], "Expected finite inputs to '1'"),
    ([IMAGES, torch.randn(3, 9)], "input of size"),  # torch's own words
])  # fmt: skip
def test_reestimation_that_fails_changes_nothing(data, message):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    net(3 * IMAGES + 2)
    with unchanged(net, match=message):
        vd.reestimate_batchnorm(net, data)
    assert net[1].momentum == 0.1


@pytest.mark.parametrize("verb", [vd.shrink, vd.export_program])
def test_layers_of_mean_zero_are_refused(verb):
    """A plain net of their means would know nothing."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    vd.convert(net, vd.variance_layer(), include="2")
    assert_refused(r"but got '2' \(Linear\) with ZeroMean", verb, net, torch.zeros(2, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused_before_anything_runs(tmp_path):
    x = torch.randn(3, 4)
    script = torch.jit.trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), x)
    told = r"TorchScript is not supported by shrink and slim \(module '0'\). Pass the Python model"
    assert_refused(told, vd.shrink, nn.Sequential(script, nn.Linear(2, 2)), x)
    assert_refused("not supported by export", vd.export_onnx, script, x, tmp_path / "net.onnx")
