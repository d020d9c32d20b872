"""Slimming: budgets are kept on every kind of net, nothing else changes, dead ends are told."""

import copy
import importlib
import sys

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.trainings import mlp
from tests.compression.nets import NETS as SHRINKABLE, Classifier
from tests.nets import Parts, assert_unchanged
from tests.refusals import assert_refused
from vardrop.compression.mask import decompose_layers
from vardrop.compression.probes import Probes, run
from vardrop.compression.unit_gates import UnitGates
from vardrop.tuning import latencies, slim_report as slimmed
from vardrop.tuning.slim import _make_source

slim_module = importlib.import_module("vardrop.tuning.slim")

# Untrained nets after a few steps: what they score means nothing here.
pytestmark = pytest.mark.filterwarnings("ignore:The accuracy on validation data went from")


def grouped():
    """A grouped convolution between two pointwise ones."""
    layers = {"one": nn.Conv2d(3, 16, 1), "two": nn.Conv2d(16, 16, 3, groups=4, bias=False)}
    layers |= {"norm": nn.BatchNorm2d(16), "three": nn.Conv2d(16, 8, 1), "head": nn.Linear(8, 4)}
    hidden = lambda n, x: n.norm(n.two(n.one(x).relu())).relu()
    return Parts(lambda n, x: n.head(n.three(hidden(n, x)).relu().mean((2, 3))), **layers)


def widening():
    """Depthwise on the input, and a convolution with two outputs per group of one input."""
    layers = {"first": nn.Conv2d(3, 3, 3, groups=3), "one": nn.Conv2d(3, 8, 1)}
    layers |= {"two": nn.Conv2d(8, 16, 3, groups=8), "three": nn.Conv2d(16, 8, 1)}
    hidden = lambda n, x: n.two(n.one(n.first(x)).relu()).relu()
    run = lambda n, x: n.head(n.three(hidden(n, x)).relu().mean((2, 3)))
    return Parts(run, **layers, head=nn.Linear(8, 4))


def batchnorm():
    body = nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(108, 20), nn.ReLU(), nn.Linear(20, 4))


NETS = {
    "mlp": (lambda: mlp(12, 32, 16, 4), (12,)), "residual": SHRINKABLE["residual"],
    "depthwise": SHRINKABLE["separable"], "concatenated": SHRINKABLE["dense block"],
    "grouped": (grouped, (3, 8, 8)), "widening": (widening, (3, 8, 8)),
    "batchnorm": (batchnorm, (3, 8, 8)),
}  # fmt: skip


def case(name, rows=64):
    """A net whose BatchNorm has seen data, and data that three features decide."""
    make, shape = NETS[name]
    net, x = make(), torch.randn(rows, *shape)
    net(x)
    return net.eval(), (x, x.flatten(1)[:, :3].argmax(1))


def quick(net, data, **budget):
    return vd.slim(net, data, data, **{"epochs": 2, "runtimes": ["torch"], **budget})


# ---- budgets


@pytest.mark.parametrize("quantity", ["macs", "bytes"])
@pytest.mark.parametrize("name", NETS)
def test_the_budget_is_kept_and_used(name, quantity):
    net, data = case(name)
    found = quick(net, data, **{quantity: 0.4})
    assert 0.15 < found.left(quantity) <= 0.4
    assert found.net(data[0]).shape == net(data[0]).shape
    types = {nn.Conv2d, nn.Linear, nn.BatchNorm2d}
    assert {type(m) for m in found.net.modules()} <= {type(m) for m in net.modules()} | types


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_loses_heads_and_units_to_a_budget_and_still_knows_its_words(tmp_path):
    x = torch.randint(1, 20, (400, 6))
    x[::3, 4:] = 0
    y, net = ((x == 3) | (x == 7)).any(1).long(), Classifier().train()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    vd.fine_tune(net, [(x, y)] * 100, nn.functional.cross_entropy, optimizer)
    train, held = (x[:300], y[:300]), (x[300:], y[300:])
    small = vd.slim(net.eval(), train, held, macs=0.5, epochs=15, lr=5e-3, runtimes=["torch"])
    assert small.before.score > 0.95
    assert small.left("macs") <= 0.5
    assert small.after.score > 0.9
    assert sum([layer.self_attn.num_heads for layer in small.net.encoder.layers]) < 8
    # Per word: the projections, the products of queries, keys and values, two layers after it.
    assert small.before.macs == 6 * 2 * ((4 * 12 * 12 + 2 * 12 * 6) + 2 * 12 * 20) + 12 * 2
    vd.save(small.net, tmp_path / "small.safetensors")
    again = vd.load(tmp_path / "small.safetensors", into=Classifier())
    assert torch.equal(again(held[0]), small.net(held[0]))


def test_a_recurrent_net_keeps_its_budget_with_as_many_units_in_every_layer():
    x, layer = torch.randn(64, 4, 5), nn.GRU(5, 8, 2, batch_first=True, bidirectional=True)
    reader = Parts(lambda n, x: n.head(n.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(16, 2))
    data = x, (x[:, -1, 0] > 0).long()
    small = vd.slim(reader.eval(), data, data, macs=0.5, epochs=20, runtimes=["torch"])
    assert 0.3 < small.left("macs") <= 0.5
    assert isinstance(small.net.layer, nn.GRU)
    assert small.net.layer.hidden_size < 8


def test_multiples_count_units_not_heads():
    gates = UnitGates(decompose_layers(Classifier()), (torch.randint(1, 20, (1, 6)),))
    kept = gates.choose(lambda kept: float(gates.cost(kept)) <= 0.6, multiple=3)
    heads = sum(bool(k) for k, u in zip(kept, gates.units, strict=True) if len(u[0].emitters) == 9)
    assert heads not in (0, 8)  # three units are one head


def test_layers_keep_multiples_of_units():
    net, x = mlp(12, 32, 24, 5, 4), torch.randn(64, 12)
    found = quick(net, (x, x[:, :3].argmax(1)), macs=0.5, multiple=8)
    widths = [m.out_features for m in found.net.modules() if isinstance(m, nn.Linear)]
    assert widths[0] % 8 == widths[1] % 8 == 0
    assert widths[2:] == [5, 4]  # fewer than eight are kept whole
    assert found.left("macs") <= 0.5


def pooled(inputs, channels):
    """A class with BatchNorm, max pool and ReLU in place, of so many channels and 32."""
    layers = {"one": nn.Conv2d(inputs, channels, 3, padding=1, bias=False)}
    layers |= {"norm": nn.BatchNorm2d(channels), "two": nn.Conv2d(channels, 32, 3, padding=1)}
    layers["head"] = nn.Linear(32, 4)
    relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
    hidden = lambda n, x: n.two(n.pool(n.relu(n.norm(n.one(x)))))
    run = lambda n, x: n.head(n.relu(hidden(n, x)).mean((2, 3)))
    return Parts(run, **layers, relu=relu, pool=pool).eval()


def test_widths_are_multiples_of_a_register_by_default():
    net, x = pooled(3, 64), torch.randn(64, 3, 8, 8)
    data = x, x.flatten(1)[:, :3].argmax(1)
    even, free = quick(net, data, macs=0.5), quick(net, data, macs=0.5, multiple=1)
    assert {even.net.one.out_channels % 8, even.net.two.out_channels % 8} == {0}
    assert even.left("macs") > 0.45
    assert {free.net.one.out_channels % 8, free.net.two.out_channels % 8} != {0}


@pytest.mark.parametrize(("macs", "kept"), [(0.5, True), (0.05, False)])
def test_convolutions_keep_16_inputs_if_the_budget_allows_it(macs, kept):
    """onnxruntime runs a convolution of fewer inputs with a slower kernel."""
    net, x = pooled(1, 16), torch.randn(64, 1, 8, 8)
    small = quick(net, (x, x.flatten(1)[:, :3].argmax(1)), macs=macs)
    assert (small.net.two.in_channels == 16) == kept
    assert small.net.two.out_channels < 32
    assert small.left("macs") <= macs


def clock(root):
    """Seconds as a root of the weights, whatever else runs here, in each runtime another one."""

    def seconds(nets, inputs, ways):
        sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in nets.items()}
        return {w: {n: size ** root[w] for n, size in sizes.items()} for w in ways}

    return seconds


@pytest.mark.parametrize("runtime, root", [("torch", 1 / 2), ("onnxruntime", 1 / 3)])
def test_a_net_is_as_fast_as_asked(monkeypatch, runtime, root):
    monkeypatch.setattr(slimmed, "latencies", clock({"torch": 1 / 2, "onnxruntime": 1 / 3}))
    net, x = mlp(64, 60, 60, 3), torch.randn(64, 64)
    data = x, x[:, :3].argmax(1)
    found = quick(net, data, latency=0.5, runtime=runtime, runtimes=[], multiple=1)
    assert 0.45 < found.left("latency") <= 0.5
    assert found.left("weights") == pytest.approx(found.left("latency") ** (1 / root))
    assert set(found.after.latency) == {"torch", runtime}


def test_the_smallest_net_that_loses_little_is_found():
    x, net = torch.linspace(-2, 2, 400).unsqueeze(1), mlp(1, 64, 64, 1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    vd.fine_tune(net, [(x, x.sin())] * 200, nn.functional.mse_loss, optimizer)
    found = quick(net, (x, x.sin()), max_drop=0.5, epochs=40, lr=1e-2)
    assert found.score == "rmse"
    assert found.after.score <= 1.5 * found.before.score
    assert found.left("macs") <= 0.5


# ---- exactness


@pytest.mark.parametrize("name", NETS)
def test_gates_are_exact(name):
    """Open gates change no output. The cut net has the costs and the outputs of the gated net."""
    net, (x, _) = case(name)
    gates, expected = UnitGates(net, (x[:1],)), run(net, (x,))[0]
    with gates.acting(net):
        assert torch.equal(run(net, (x,))[0], expected)
    assert float(gates.cost(torch.ones(len(gates.units)))) == pytest.approx(1.0)
    kept, folded = gates.evenly(0.5), copy.deepcopy(net)
    gates.logit.data.copy_(torch.where(kept, 1.0, -9.0))  # 0.777 or closed
    with gates.acting(net):
        expected = run(net, (x,))[0]
    gates.fold(folded, kept)
    small, plan = vd.shrink(folded, x[:1])
    assert torch.allclose(small(x), expected, atol=1e-5)
    before, after = plan.total("macs")
    assert after / before == pytest.approx(float(gates.cost(kept)))
    sizes = [sum(t.nbytes for t in n.state_dict().values()) for n in (net, small)]
    assert sizes[1] / sizes[0] == pytest.approx(float(gates.cost(kept, "bytes")))
    assert sizes[1] < sizes[0]


def test_gates_draw_once_per_batch_in_training():
    net, (x, _) = case("mlp")
    gates = UnitGates(net, (x[:1],))
    gates.logit.data.zero_()
    net.train()
    with gates.acting(net), torch.no_grad():
        outputs = torch.stack([net(x[:1].expand(3, -1)) for _ in range(20)])
    assert len(outputs[0].unique(dim=0)) == 1
    assert len(outputs[:, 0].unique(dim=0)) > 10


def test_the_given_net_is_left_as_it_is():
    net, data = case("residual")
    state = torch.get_rng_state()
    with assert_unchanged(net):
        quick(net, data, macs=0.5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_gives_one_net():
    net, data = case("batchnorm")
    net.insert(4, nn.Dropout(0.2))
    one, same, other = (quick(net, data, macs=0.5, seed=s).net(data[0]) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


def test_the_cut_is_proven_and_keeps_the_layout_of_the_weights():
    net, (x, y) = case("residual")
    net = net.to(memory_format=torch.channels_last)
    found = quick(net, (x, y), macs=0.5)
    assert found.net.one.weight.is_contiguous(memory_format=torch.channels_last)
    assert found.plan.proof.startswith("Equal on the example and on 5 random inputs")
    assert not Probes(net, (x[:1],)).equal(found.net)  # the probes tell nets apart


def test_the_rate_rises_again_after_the_cut(monkeypatch):
    phases, minimize = [], slim_module.minimize

    def record(*arguments, schedule, **options):
        rates = []
        phases.append(rates)
        note = lambda at: rates.append(schedule(at)[0]) or schedule(at)
        return minimize(*arguments, schedule=note, **options)

    monkeypatch.setattr(slim_module, "minimize", record)
    net, data = case("batchnorm")
    quick(net, data, macs=0.25, epochs=20, lr=1e-2)
    with_gates, after = phases
    assert len(with_gates) + len(after) == 160
    assert with_gates == sorted(with_gates)
    assert after[0] < 0.1 * max(after)
    assert max(after) == pytest.approx(1e-2, rel=0.02)
    assert after.index(max(after)) < len(after) / 5
    assert after[-1] < 1e-5


# ---- what users bring


def test_batches_of_a_loader_train():
    net, data = case("mlp")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=16)
    found = quick(net, loader, macs=0.5, epochs=1)
    assert (found.left("macs") <= 0.5, found.score) == (True, "accuracy")


def test_a_net_of_two_arguments_learns_from_a_stream():
    x, y = torch.randn(32, 8), torch.arange(32) % 3
    batches = [((x[:, :4], x[:, 4:]), y)] * 3
    data = type("Stream", (), {"__iter__": lambda self: iter(batches)})()  # without a length
    run = lambda n, x, y: n.two(n.norm(n.one(torch.cat([x, y], 1))).relu())
    layers = {"one": nn.Linear(8, 16), "norm": nn.BatchNorm1d(16), "two": nn.Linear(16, 3)}
    assert quick(Parts(run, **layers), data, macs=0.5).net.one.out_features == 8


def test_slimming_learns_a_regression_in_any_unit():
    net, x = mlp(4, 48, 1), torch.randn(256, 4)
    small = quick(net, (x, (1000 * x[:, :1] + 5000)), macs=0.5, epochs=60, lr=0.5)
    assert small.score == "rmse"
    assert small.after.score < 0.2 * small.before.score


def test_a_likelihood_is_a_loss():
    net, x = mlp(4, 32, 2), torch.randn(64, 4)
    assert quick(net, (x, x[:, :1]), macs=0.5, loss=vd.HeteroscedasticGaussian()).score == "loss"


def test_rows_that_fill_no_batch_wait_for_the_next_pass():
    generator = torch.Generator().manual_seed(0)
    source = _make_source((torch.arange(1100.0), torch.arange(1100.0)), torch.device("cpu"))
    passes = [torch.cat([batch.y for batch in source.batches(generator)]) for _ in range(2)]
    assert [len(p) for p in passes] == [1024, 1024]
    assert not torch.equal(*passes)


# ---- refusals and dead ends


@pytest.mark.parametrize("change, message", [
    ({}, "Expected one of `macs`, `latency`, `bytes`, `max_drop`, but got none"),
    ({"macs": 0.5, "bytes": 0.5}, "but got macs, bytes"),
    ({"macs": 50}, "Expected `macs` to be a finite number and above 0 and below 1, but got 50"),
    ({"max_drop": -1}, "Expected `max_drop`"),
    ({"macs": 0.5, "epochs": 0}, "Expected `epochs`"),
    ({"macs": 0.5, "lr": 0}, "Expected `lr`"),
    ({"macs": 0.5, "multiple": 0}, "Expected `multiple`"),
    ({"latency": 0.5, "runtime": "tensorrt"}, "Expected `runtime` to be one of 'torch'"),
    ({"macs": 0.5, "runtimes": ["tensorrt"]}, "Expected `runtimes` to be one of 'torch'"),
    ({"macs": 0.5, "loss": lambda o, y: o}, "Expected `loss` to give one finite number"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, message):
    net, data = case("mlp")
    assert_refused(message, vd.slim, net, data, data, **change)


def test_an_interrupt_leaves_the_net_unchanged(capsys):
    net, (x, y) = case("batchnorm")
    reads = iter(range(9))

    def loss(output, target):
        if next(reads) >= 4:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    with assert_unchanged(net), pytest.raises(KeyboardInterrupt):
        quick(net, (x, y), macs=0.5, loss=loss, progress=True)
    assert "slim (macs=0.5): 3/16" in capsys.readouterr().err


def test_bad_data_are_refused():
    net, (x, y) = case("mlp")
    start = lambda train, held=(x, y): vd.slim(net, train, held, macs=0.5, epochs=1)
    assert_refused("`data` to be tensors, or .* in every epoch.*list_iter", start, iter([(x, y)]))
    assert_refused("Expected at least 1 batches from list, but got 0", start, [])
    assert_refused("same positive length in all tensors, but got 64 and 3", start, (x, y[:3]))
    numbers = x, y.float()
    assert_refused("Reshape them, or pass `loss`", start, numbers, numbers)
    assert_refused("Expected a finite loss, but got nan", start, (x * torch.nan, y))


@pytest.mark.parametrize("make, message", [
    (lambda: vd.convert(mlp(12, 8, 4), vd.sparse_vd()), "Expected `net` to be plain, but got noise"),
    (lambda: mlp(12, 4), "hidden units that can be removed, but got none"),
    (lambda: mlp(12, 8, 4).requires_grad_(False), r"Call net.requires_grad_\(\)"),
    (lambda: nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 4)),
     r"12 units of '0' stay: '1' \(LayerNorm\) takes"),
])  # fmt: skip
def test_nets_that_cannot_be_slimmed_are_refused(make, message):
    assert_refused(message, quick, make(), case("mlp")[1], macs=0.5)


def test_what_has_to_stay_is_noted():
    net, data = case("widening")
    notes = quick(net, data, macs=0.5).notes
    assert notes == ("3 units of 'first' stay: its groups read the input of the model.",)


@pytest.mark.parametrize("budget, least", [
    ({"macs": 1e-6}, "`macs` to be at least 0.018, the cost of .* of 1 units, but got 1e-06"),
    ({"bytes": 1e-6}, "`bytes` to be at least 0"),
    ({"macs": 0.1, "multiple": 8}, "`macs` to be at least 0.2.* multiples of 8 units"),
    ({"latency": 1e-6}, "`latency` to be at least 0"),
])  # fmt: skip
def test_a_budget_that_no_width_can_meet_is_refused_before_any_training(monkeypatch, budget, least):
    net, data = case("mlp")
    monkeypatch.setattr(slimmed, "latencies", clock({"torch": 1 / 2}))
    monkeypatch.setattr(slim_module, "minimize", lambda *_, **__: pytest.fail("it trains"))
    with assert_unchanged(net):
        assert_refused(f"Expected {least}", quick, net, data, **budget)


def test_a_collapse_is_told():
    net, x = mlp(12, 64, 4), torch.randn(200, 12)
    data = x, net(x).argmax(1)  # which no small net can know
    with pytest.warns(UserWarning, match="accuracy on validation data went from 1 to"):
        quick(net, data, macs=0.1, epochs=1)
    with pytest.warns(UserWarning, match=r"No net within max_drop=0 was found"):
        quick(net, data, max_drop=0, epochs=1)


# ---- the report


def test_the_report_shows_both_nets():
    net, data = case("residual")
    found = quick(net, data, macs=0.5)
    text = str(found)
    assert "accuracy on validation data" in text
    assert "ms in torch, 64 rows" in text
    assert f"{found.before.macs:,}" in text
    assert found.before.bytes == sum(t.nbytes for t in net.state_dict().values())
    assert found.left("latency") == found.left("torch")
    assert_refused("Expected `quantity` to be one of", found.left, "speed")


def test_nets_are_timed_in_onnxruntime():
    net, (x, _) = case("mlp")
    found = latencies({"one": net}, (x,), ("torch", "onnxruntime"))
    assert set(found) == {"torch", "onnxruntime"}
    assert all(v["one"] > 0 for v in found.values())
    assert_refused("Expected `runtimes`", latencies, {"one": net}, (x,), ("cuda",))


def test_a_way_that_does_not_work_here_is_noted(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    net, data = case("mlp")
    found = quick(net, data, macs=0.5, runtimes=["torch", "onnxruntime"])
    assert list(found.after.latency) == ["torch"]
    assert any(n.startswith("Not timed by onnxruntime: Expected the package") for n in found.notes)
