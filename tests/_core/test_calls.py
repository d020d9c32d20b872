"""Whatever a net takes and gives: tuples, dictionaries, keyword arguments, outputs with logits."""

import sys
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused
from tests.replay import replay
from vardrop._core import progress, rng
from vardrop._core.calls import num_examples, split_batch
from vardrop._core.progress import ProgressLine, track


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Encoding(UserDict):
    """Like the batches of tokenizers: a mapping that is no dict."""


def forward(net, first, second=None, scale=1.0):
    """Two named inputs and a flag; an output with logits."""
    hidden = net.a(first) + (0 if second is None else net.b(second))
    return Output(hidden * scale, hidden)


def of_two(run):
    """A net whose forward is this function."""
    net = type("Net", (Parts,), {"forward": run})(run, a=nn.Linear(4, 3), b=nn.Linear(2, 3))
    return vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0))


def noisy():
    return of_two(forward)


def batch(count=6):
    own = torch.Generator().manual_seed(1)
    first = torch.randn(count, 4, generator=own)
    return {"first": first, "second": torch.randn(count, 2, generator=own)}


@pytest.mark.parametrize("draw", ["estimator", "functions"])
def test_a_dictionary_predicts_what_its_tensors_do(draw):
    net = noisy()
    joined = Parts(lambda own, x: own.net(x[:, :4], x[:, 4:]).logits, net=net)
    tensor = torch.cat(list(batch().values()), 1)
    expected = vd.predict(joined, tensor, samples=8, seed=3, draw=draw)
    for x in (batch(), Encoding(batch()), [batch()], [(batch(), torch.zeros(6))]):
        found = vd.predict(net, x, samples=8, seed=3, draw=draw)
        torch.testing.assert_close(found.probs, expected.probs)
    assert len(vd.predict(net, [batch(), batch(3)], samples=4)) == 9
    assert vd.predict(net, batch(64), samples=4, memory=256).probs.shape == (64, 3)  # in parts


def test_the_elbo_takes_what_the_net_takes():
    net, y = noisy(), torch.zeros(6, dtype=torch.long)
    elbo = vd.ELBO(net, vd.Categorical(), num_data=10)
    inputs = batch(), Encoding(batch()), tuple(batch().values())
    assert len({replay(elbo, x, y).loss.item() for x in inputs}) == 1
    assert vd.predict(elbo, batch(), seed=0).probs.shape == (6, 3)


def test_output_picks_a_tensor():
    net = noisy()
    elbo = vd.ELBO(net, vd.Gaussian(), num_data=10, output=lambda out: out.hidden)
    assert elbo({**batch(), "scale": 0.0}, torch.zeros(6, 3)).nll > 3 * 0.9190
    x = {**batch(), "scale": 0.0}
    assert not vd.predict(net, x, likelihood=vd.Values()).mean.any()
    assert vd.predict(net, x, likelihood=vd.Values(), output=lambda out: out.hidden).mean.all()
    assert vd.predict(elbo, x).mean.all()


def test_a_likelihood_of_ones_own_gets_all_of_the_output():
    seen = []
    elbo = vd.ELBO(noisy(), lambda out, y: seen.append(out) or out.logits.mean(), num_data=10)
    elbo(batch(), None)
    assert isinstance(seen[0], Output)


def test_what_is_refused():
    net, nan = noisy(), torch.full((6, 4), torch.nan)
    wrong = {**batch(), "second": torch.zeros(5, 2)}
    bare = of_two(lambda net, first, second: (net.a(first), None))
    told = 'one tensor for mode="moments", but got dict'
    for match, model, x, options in (
        ("one number of examples, but got 5 and 6", net, wrong, {}),
        ("`first` to be finite, but got 24", net, {**batch(), "first": nan}, {}),
        ("a dictionary of tensors.*but got list of str", net, ["text"], {}),
        (told, net, batch(), {"mode": "moments"}),
        ("`logits`, but got tuple. Pass output=", bare, batch(), {}),
    ):
        assert_refused(match, vd.predict, model, x, **options)
    y = torch.zeros(6, dtype=torch.long)
    assert_refused("`logits`, but got tuple", vd.ELBO(bare, vd.Categorical(), 10), batch(), y)


def test_a_net_that_takes_the_dictionary_itself_gets_it():
    net = of_two(lambda net, batch: net.a(batch["first"]) + net.b(batch["second"]))
    assert vd.predict(net, batch(), samples=4).probs.shape == (6, 3)
    assert vd.ELBO(net, vd.Categorical(), 10)(batch(), torch.zeros(6, dtype=torch.long)).nll > 0


def test_rows_and_parts():
    assert num_examples((torch.zeros(3, 1), {"a": [torch.zeros(3)], "b": None})) == 3
    assert [num_examples(p) for p in split_batch(batch(7), 3)] == [3, 3, 1]
    assert_refused("examples along axis 0, but got dict", num_examples, {"flag": True})


# States of torch's generators on any device.


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that hold nothing but generators. The state of a fresh generator is its seed."""
    states, real = {}, torch.Generator
    read = lambda device: states.setdefault(device, torch.tensor([0]))
    write = lambda state, device: states.update({device: state})
    generators = SimpleNamespace(states=states, get_rng_state=read, set_rng_state=write)
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators)
    seeded = lambda seed: SimpleNamespace(get_state=lambda: torch.tensor([seed]))
    fresh = lambda device="cpu": real() if device == "cpu" else SimpleNamespace(manual_seed=seeded)
    monkeypatch.setattr(rng.torch, "Generator", fresh)
    return generators


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_every_device_are_seeded_kept_and_given_back(gpus, kind):
    device = torch.device(kind, 1)
    gpus.states[device] = torch.tensor([5])
    torch.manual_seed(8)
    before = torch.get_rng_state()
    with rng.preserve_rng(device, seed=3):
        assert gpus.states[device].tolist() == [3]
        drawn, kept = torch.rand(2), rng.generator_states(device)
        assert set(kept) == {"noise", f"noise_{kind}"}
        rng.seed_generators(device, 4)
        assert gpus.states[device].tolist() == [4]
        rng.set_generator_states(device, kept, 0)
        assert gpus.states[device].tolist() == [3]
    assert gpus.states == {device: torch.tensor([5])}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_a_checkpoint_of_another_device_seeds_this_one(gpus):
    device = torch.device("cuda", 0)
    rng.set_generator_states(device, {"noise": torch.get_rng_state()}, 11)
    assert gpus.states[device].tolist() == [11]


def test_generators_are_given_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), rng.preserve_rng(seed=1):
        torch.rand(3).view(7)
    assert torch.equal(before, torch.get_rng_state())


# The line of progress: when it is written, what it contains, and that it ends with a newline.


def test_a_line_shows_steps_and_text_and_ends_after_an_error(capsys):
    def interrupt():
        with ProgressLine("slim", 4, True) as line:
            line.advance(text="loss 0.5")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    first, last = capsys.readouterr().err.split("\r")[1:]
    assert first.startswith("slim: 1/4, 0 s left, 0 s so far, loss 0.5")
    assert last.endswith("\n")


@pytest.mark.parametrize("items, last", [(iter("ab"), "2"), ("ab", "2/2, 0 s left")])
def test_items_pass_through_and_an_unknown_total_is_left_out(capsys, items, last):
    assert list(track(items, "predict", progress=True)) == ["a", "b"]
    assert capsys.readouterr().err.endswith(f"predict: {last}, 0 s so far\n")


@pytest.mark.parametrize("is_terminal, value, delay, shown", [
    (True, None, 0.0, True), (True, None, 60.0, False), (False, None, 0.0, False),
    (False, True, 60.0, True), (True, False, 0.0, False),
])  # fmt: skip
def test_the_terminal_and_the_time_decide(monkeypatch, capsys, is_terminal, value, delay, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "_DELAY", delay)
    list(track([1, 2], "train", progress=value))
    assert bool(capsys.readouterr().err) == shown
