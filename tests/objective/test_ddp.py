"""Two gloo processes give the gradients of one, under every recipe of the contract table."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vardrop as vd
from tests.objective.processes import run_processes
from vardrop.testing import HEADS, RECIPES


class Steps(nn.Module):
    """A net on the inputs as a sequence of three steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 3)

    def forward(self, x):
        steps = x.view(-1, 3, 2).repeat(1, 1, 2)
        attends = isinstance(self.layer, nn.MultiheadAttention)
        return self.last(self.layer(*[steps] * (3 if attends else 1))[0].mean(1))


SEQUENCES = {
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 4, 2, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "rnn": lambda: nn.RNN(4, 4, batch_first=True),
}
ALL = RECIPES | HEADS | dict.fromkeys(SEQUENCES, vd.sparse_vd())
PARTS = [slice(0, 4), slice(4, 8)]
# One of every kind of posterior, prior, estimator, gate, head and sequence.
QUICK = (
    "bayes_by_backprop", "bayes_by_backprop-weight_sample", "bayes_by_backprop-flipout",
    "bayes_by_backprop-mixture", "bayes_by_backprop-learned_prior", "own-noisy_bias",
    "variational_dropout-b_layer", "sparse_vd", "ard", "variance_layer", "dropconnect",
    "variational_dropout-a", "mc_dropout", "dependent_beta_bernoulli", "structured_pruning", "l0",
    "bayesian_compression", "dropmax", "attention", "lstm",
)  # fmt: skip


def names(*left_out):
    """The recipes as parameters; those that are not quick are slow."""
    slow = pytest.mark.slow
    kept = [n for n in ALL if n not in left_out]
    return [n if n in QUICK else pytest.param(n, marks=slow) for n in kept]


def selected(request):
    """The recipes of the tests that run; only these are computed."""
    items = [item for item in request.session.items if item.path == request.node.path]
    chosen = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in ALL if name in chosen]


def make(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        net = Steps(SEQUENCES[name]()) if name in SEQUENCES else plain
        vd.convert(net, ALL[name])
    return vd.ELBO(net, vd.Categorical(), num_data=20, samples=2)


def data():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def step(module, rank):
    """Backward through one process's part of the batch, with noise from a seed of its own."""
    x, y = (t[PARTS[rank]] for t in data())
    with torch.random.fork_rng():
        torch.manual_seed(10 + rank)
        module(x, y).loss.backward()


def gradients(elbo):
    return {n: p.grad.clone() for n, p in elbo.named_parameters() if p.grad is not None}


def worker(rank, unused, chosen):
    grads = {name: after_a_step(make(name), rank, unused) for name in chosen}
    return grads | {"gathered": gathered(rank), "noise": noise(rank)}


def noise(rank):
    """Two steps of a bare loop on the same inputs: losses and the first weights."""
    torch.manual_seed(0)
    elbo = make("sparse_vd")
    wrapped, (x, y), losses = DistributedDataParallel(elbo), data(), []
    optimizer = torch.optim.SGD(elbo.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())  # as the docstring of ELBO says
    for _ in range(2):
        optimizer.zero_grad()
        loss = wrapped(x, y).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "weight": elbo.net[0].weight.detach()}


def after_a_step(elbo, rank, unused):
    step(DistributedDataParallel(elbo, find_unused_parameters=unused), rank)
    return gradients(elbo)


def gathered(rank):
    """Gradients of a batch alone, and of a second that is added to it."""
    elbo = make("sparse_vd")
    wrapped = DistributedDataParallel(elbo)
    with wrapped.no_sync():
        step(wrapped, rank)
    alone = gradients(elbo)
    step(wrapped, rank)
    return {"alone": alone, "both": gradients(elbo)}


UNUSED = pytest.param(True, id="find_unused", marks=pytest.mark.slow)
WAYS = [pytest.param(False, id="all_used"), UNUSED]


@pytest.fixture(scope="module", params=WAYS)
def found(request, tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ddp")
    return run_processes(worker, 2, folder, request.param, selected(request))


def apart(name):
    """The gradients of the two halves of the batch, in one process."""
    parts = []
    for rank in range(2):
        elbo = make(name)
        step(elbo, rank)
        parts.append(gradients(elbo))
    return parts


@pytest.mark.parametrize("name", names())
def test_gradients_equal_the_single_process(name, found):
    (first, second), got = apart(name), found[0][name]
    assert set(got) == set(first)
    for key, grad in got.items():
        expected = (first[key] + second[key]) / 2
        scale = expected.abs().max().clamp(min=1.0)
        assert float((grad - expected).abs().max() / scale) <= 1e-6, key


def test_gradients_of_several_batches_are_gathered(found):
    """Two batches, the first without a word to the other process: noise differs between them."""
    parts = apart("sparse_vd")
    whole = {key: first + parts[1][key] for key, first in parts[0].items()}
    for part, process in zip(parts, found, strict=True):
        torch.testing.assert_close(process["gathered"]["alone"], part, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(process["gathered"]["both"], whole, rtol=1e-5, atol=1e-6)
    assert any(bool((parts[0][k] != parts[1][k]).any()) for k in whole)


def test_ranks_with_their_own_seed_draw_different_noise_for_one_model(found):
    first, second = (process["noise"] for process in found)
    assert bool((first["losses"] != second["losses"]).all())
    assert torch.equal(first["weight"], second["weight"])
