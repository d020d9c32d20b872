"""Two gloo processes give the gradients of one, under every recipe of the contract table."""

import importlib
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import vardrop as vd
from tests.nets import Parts
from tests.objective.processes import run_processes
from tests.pairs import slow_but
from vardrop._core import sharding as sharded
from vardrop.functional import GeneratorNoise, draw_from, standard_normal
from vardrop.noisy import Noisy, enclosed
from vardrop.testing import HEADS, RECIPES


def steps(net, x):
    """The inputs as a sequence of three steps."""
    x = x.view(-1, 3, 2).repeat(1, 1, 2)
    attends = isinstance(net.layer, nn.MultiheadAttention)
    return net.last(net.layer(*[x] * (3 if attends else 1))[0].mean(1))


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
    return slow_but([n for n in ALL if n not in left_out], *QUICK)


def selected(request):
    """The recipes of the tests that run; only these are computed."""
    items = [item for item in request.session.items if item.path == request.node.path]
    chosen = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in ALL if name in chosen]


def make(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in SEQUENCES:
            net = Parts(steps, layer=SEQUENCES[name](), last=nn.Linear(4, 3))
        else:
            net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
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


def backward(rank, elbo, wrapped=None):
    """The gradients of a step, of a wrapped objective if there is one."""
    step(wrapped or elbo, rank)
    return gradients(elbo)


def gradients(elbo):
    return {n: p.grad.clone() for n, p in elbo.named_parameters() if p.grad is not None}


def of_copies(rank, name, unused):
    """The gradients of a net that every process has whole."""
    elbo = make(name)
    return backward(rank, elbo, DistributedDataParallel(elbo, find_unused_parameters=unused))


def gathered(rank):
    """Gradients of a batch alone, and of a second that is added to it."""
    elbo = make("sparse_vd")
    wrapped = DistributedDataParallel(elbo)
    with wrapped.no_sync():
        alone = backward(rank, elbo, wrapped)
    return {"alone": alone, "both": backward(rank, elbo, wrapped)}


# Nets whose tensors are spread over two gloo processes equal the net of one.


MIXTURE = "bayes_by_backprop-mixture"  # its KL is drawn, by each process for its own part
PARALLEL = (
    "bayes_by_backprop", "bayes_by_backprop-weight_sample", "bayes_by_backprop-flipout",
    "bayes_by_backprop-learned_prior", "bayes_by_backprop-pretrained",
    "variational_dropout-b_layer", "sparse_vd", "ard",
)  # fmt: skip
SEEDED = ("bayes_by_backprop", "sparse_vd", "bayes_by_backprop-weight_sample")
spread = importlib.import_module("vardrop.functional.random")
# Views that leave a sharded module: torch warns, in case somebody writes into them.
VIEWS = "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"
pytestmark = pytest.mark.filterwarnings(VIEWS)


def start(name):
    """The ELBO of a recipe; at a bound of alpha every term is judged by itself, so none is there."""
    elbo = make(name)
    for key, p in elbo.named_parameters():
        if key.endswith("log_alpha"):
            p.data.fill_(-0.7)
    return elbo


def shard(elbo, ways, policy=None, mesh=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    policy = {} if policy is None else {"mp_policy": policy}
    if ways == "layers":
        inside = enclosed(elbo.net)
        for module in list(elbo.net.modules()):
            if isinstance(module, Noisy | nn.Linear) and id(module) not in inside:
                fully_shard(module, mesh=mesh, **policy)
    fully_shard(elbo, mesh=mesh, **policy)
    return elbo


def together(tensors):
    return {n: sharded.full_tensor(t).detach().clone() for n, t in tensors.items()}


def of_layers(rank, name):
    """What the sharded net of a recipe gives: gradients, a step, its KL, predictions."""
    (x, _), elbo = data(), shard(start(name), "layers")
    optimizer = torch.optim.Adam(elbo.parameters(), 1e-2)
    with torch.no_grad():
        found = {"kl": float(vd.kl(elbo.net)) if name in vd.testing.RECIPES else 0.0}
    found["gradients"] = together(backward(rank, elbo))
    optimizer.step()
    found["state"] = together(elbo.state_dict())
    found["mean"] = vd.predict(elbo, x, mode="mean").mean
    found["draws"] = vd.predict(elbo, x, 3, seed=5).draws
    found["all used"], found["find unused"] = (of_copies(rank, name, u) for u in (False, True))
    found["unit"] = together(backward(rank, shard(start(name), "unit")))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found["bfloat16"] = together(backward(rank, shard(start(name), "layers", policy)))
    return found


def saved(folder):
    elbo = shard(start("bayes_by_backprop-learned_prior"), "layers")
    dcp.save(get_model_state_dict(elbo), checkpoint_id=folder)
    return together(dict(elbo.state_dict()))


def drawn_kl():
    """The gradient of a drawn KL on the rows of this process, and the seed it was drawn from."""
    net = shard(start(MIXTURE), "layers").net
    torch.manual_seed(30 + dist.get_rank())
    vd.kl(net[0]).backward()
    return net[0].weight.grad.to_local()


def refused():
    try:
        vd.predict(shard(start("sparse_vd"), "layers"), data()[0], draw="functions")
    except vd.VardropError as error:
        return str(error)


def wide(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        vd.convert(net, ALL[name])
    return vd.ELBO(net, vd.Categorical(), num_data=20)


def tensor_parallel(name):
    elbo, plan = wide(name), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(elbo.net, init_device_mesh("cpu", (2,)), plan)
    return elbo, *data()


def parallel(name):
    """One step by tensor parallel, from other seeds in both processes; and predictions."""
    elbo, x, y = tensor_parallel(name)
    torch.manual_seed(dist.get_rank())
    parts = elbo(x, y)
    parts.loss.backward()
    found = {"nll": parts.nll.item(), "kl": parts.kl.item(), "gradients": together(gradients(elbo))}
    found["mean"] = vd.predict(elbo, x, mode="mean").mean
    return {**found, "draws": vd.predict(elbo, x, 2, seed=1).draws}


def with_seeds(name):
    """Gradients by tensor parallel, with noise that the single process can draw too."""
    (elbo, x, y), seeds = tensor_parallel(name), iter((100, 200))
    before, spread.common_seed = spread.common_seed, lambda like, own: next(seeds)
    elbo(x, y).loss.backward()
    spread.common_seed = before
    return together(gradients(elbo))


def worker(rank, folder, chosen):
    found = {name: of_layers(rank, name) for name in chosen}
    found["gathered"] = gathered(rank)
    found |= {("parallel", name): parallel(name) for name in PARALLEL}
    found |= {("seeds", name): with_seeds(name) for name in SEEDED}
    return found | {"saved": saved(folder), "drawn": drawn_kl(), "refused": refused()}


def loaded(rank, folder):
    elbo = vd.ELBO(make("bayes_by_backprop-learned_prior").net, vd.Categorical(), 20)
    state = get_model_state_dict(shard(elbo, "layers"))
    dcp.load(state, checkpoint_id=folder)
    return together(state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all processes of pytest."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "spread"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def found(request, folder):
    """What both processes found."""
    return run_processes(worker, 2, folder, str(folder / "files"), selected(request))


def halved(elbo):
    """The fit alone in bfloat16: the KL of sharded parameters is one of float32."""
    elbo.set_beta(0.0)
    for p in elbo.parameters():
        p.data = p.data.bfloat16()
    return Parts(lambda net, x, y: net.elbo(x.bfloat16(), y), elbo=elbo)


def averaged(name, begin=start, wrap=lambda elbo: None):
    """The mean of the gradients of both halves of the batch, in one process."""
    elbos = [begin(name) for _ in range(2)]
    first, second = (backward(rank, elbo, wrap(elbo)) for rank, elbo in enumerate(elbos))
    return {key: (grad.float() + second[key].float()) / 2 for key, grad in first.items()}


def assert_near(got, expected, tolerance):
    assert set(got) == set(expected)
    for key, value in expected.items():
        scale = value.abs().max().clamp(min=1.0)
        assert float((got[key] - value).abs().max() / scale) <= tolerance, key


def test_gradients_of_several_batches_are_gathered(found):
    """Two batches, the first without a word to the other process: noise differs between them."""
    parts = [backward(rank, make("sparse_vd")) for rank in range(2)]
    whole = {key: first + parts[1][key] for key, first in parts[0].items()}
    for part, process in zip(parts, found, strict=True):
        torch.testing.assert_close(process["gathered"]["alone"], part, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(process["gathered"]["both"], whole, rtol=1e-5, atol=1e-6)
    assert any(bool((parts[0][k] != parts[1][k]).any()) for k in whole)


WAYS = {"all used": make, "find unused": make, "gradients": start, "unit": start}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("name", names())
def test_gradients_equal_the_single_process(name, ways, found):
    if (name, WAYS[ways]) == (MIXTURE, start):
        pytest.skip("its KL is drawn by each process for its own part")
    for process in found:
        assert_near(process[name][ways], averaged(name, WAYS[ways]), 1e-6)


@pytest.mark.parametrize("name", names(MIXTURE, *vd.testing.HEADS, *SEQUENCES))
def test_every_process_knows_the_whole_kl(name, found):
    expected = vd.kl(start(name).net).item()
    for rank in range(2):
        assert found[rank][name]["kl"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", names(MIXTURE))
def test_half_precision_keeps_parameters_and_gradients_in_single(name, found):
    got = found[0][name]["bfloat16"]
    assert {g.dtype for g in got.values()} == {torch.float32}
    expected, elbo = averaged(name, wrap=halved), start(name)
    if (divergence := vd.kl(elbo.net)).requires_grad:
        (divergence / elbo.num_data).backward()
    for key, p in elbo.named_parameters():
        if p.grad is not None:
            expected[key] = expected[key] + p.grad if key in expected else p.grad
    assert_near(got, expected, 1e-6)


@pytest.mark.parametrize("name", names())
def test_predictions_are_those_of_the_whole_net(name, found):
    elbo, x = start(name), data()[0]
    elbo.load_state_dict(found[0][name]["state"])
    mean = vd.predict(elbo, x, mode="mean").mean
    torch.testing.assert_close(found[0][name]["mean"], mean, rtol=1e-5, atol=1e-6)
    with draw_from(GeneratorNoise(5)), vd.sampling(elbo.net.eval()), torch.no_grad():
        draws = torch.stack([elbo.net(x) for _ in range(3)])
    torch.testing.assert_close(found[0][name]["draws"], draws, rtol=1e-5, atol=1e-6)


def test_a_drawn_kl_is_drawn_by_each_process_for_its_rows(found):
    layer = start(MIXTURE).net[0]
    for rank, (first, last) in enumerate([(0, 3), (3, 5)]):
        layer.weight.grad = None
        rows = layer.noisy_tensors()["weight"].rows(first, last)
        torch.manual_seed(30 + rank)
        rows.kl().backward()
        got = found[rank]["drawn"]
        torch.testing.assert_close(got, layer.weight.grad[first:last], rtol=1e-6, atol=1e-7)


def test_a_checkpoint_loads_into_one_process(found, folder):
    elbo = make("bayes_by_backprop-learned_prior")
    for p in elbo.parameters():
        p.data.zero_()
    state = elbo.state_dict()
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(state, checkpoint_id=str(folder / "files"), no_dist=True)
    torch.testing.assert_close(state, found[0]["saved"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_checkpoint_loads_into_three_processes(found, folder):
    for got in run_processes(loaded, 3, folder, str(folder / "files")):
        torch.testing.assert_close(got, found[0]["saved"], rtol=0, atol=0)


@pytest.mark.parametrize("name", PARALLEL)
def test_tensor_parallel_draws_one_net(name, found):
    one, two = (found[r]["parallel", name] for r in range(2))
    elbo, (x, _) = wide(name), data()
    assert one["nll"] == two["nll"]  # other seeds, yet the same noise where they must agree
    assert one["kl"] == pytest.approx(vd.kl(elbo.net).item(), rel=1e-6)
    torch.testing.assert_close(one["gradients"], two["gradients"], rtol=0, atol=0)
    expected = vd.predict(elbo, x, mode="mean").mean
    torch.testing.assert_close(one["mean"], expected, rtol=1e-5, atol=1e-6)
    assert one["draws"].shape == (2, 8, 3)
    assert bool((one["draws"][0] != one["draws"][1]).all())


@pytest.mark.parametrize("name", SEEDED)
def test_tensor_parallel_has_the_gradients_of_the_single_process(name, found):
    elbo, (x, y) = wide(name), data()
    whole_weights = name.endswith("weight_sample")

    def noise(seed, shape, split):
        parts = []
        for rank in range(1 if split is None else 2):
            with draw_from(GeneratorNoise(seed + rank)):
                parts.append(standard_normal(shape, x))
        joined = parts[0] if split is None else torch.cat(parts, split)
        return (joined, None) if whole_weights else joined

    # The first layer is split by outputs, the second by inputs.
    first = noise(100, (4, 6), 0) if whole_weights else noise(100, (8, 4), 1)
    second = noise(200, (3, 4), 1) if whole_weights else noise(200, (8, 3), None)
    loss = elbo.likelihood(elbo.net[2](elbo.net[0](x, noise=first).relu(), noise=second), y)
    (loss + vd.kl(elbo.net) / elbo.num_data).backward()
    for rank in range(2):
        assert_near(found[rank]["seeds", name], gradients(elbo), 1e-6)


def test_ways_that_need_a_copy_are_refused_for_spread_nets(found):
    assert "refused" in found[0]
    assert "mode='sample' or 'mean' with draw='estimator'" in found[0]["refused"]


HYBRID = ("bayes_by_backprop", "sparse_vd", "variational_dropout-b_layer")


def of_replicas(rank):
    """Gradients of the means and KL, two replicas of two shards each, all with the same rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: of_means(shard(start(name), "layers", mesh=mesh)) for name in HYBRID}


def of_means(elbo):
    x, y = data()
    with vd.noisy.sampling(elbo.net, False):
        parts = elbo(x, y)
        parts.loss.backward()
    grads = {n: p.grad for n, p in elbo.named_parameters() if p.grad is not None}
    return {"kl": parts.kl.detach(), **together(grads)}


@pytest.mark.slow
def test_replicas_of_shards_have_the_gradients_of_the_single_process(folder):
    for found in run_processes(of_replicas, 4, folder):
        for name in HYBRID:
            assert_near(found[name], of_means(start(name)), 1e-6)
