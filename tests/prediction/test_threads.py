"""One net serves several threads, and an interrupt leaves it as it was."""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from experiments.selective import unlabelled_kappa
from tests.nets import Parts
from tests.refusals import state
from tests.replay import replay
from vardrop.functional import GeneratorNoise, draw_from, noise_source
from vardrop.prediction import draw, predict

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def residual():
    """BatchNorm, dropout as a module and as a function, noisy layers."""

    def run(net, x):
        h = net.a(x).relu()
        h = h + net.norm(net.b(h)).relu()
        return net.c(net.drop(functional.dropout(h, 0.2, training=True)))

    layers = {"a": nn.Linear(8, 12), "b": nn.Linear(12, 12), "c": nn.Linear(12, 3)}
    return Parts(run, **layers, norm=nn.BatchNorm1d(12), drop=nn.Dropout(0.3))


def plain():
    """As moments can carry it."""
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3), nn.Dropout(0.3))


def chain():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def noisy(make):
    torch.manual_seed(0)
    return vd.convert(make(), vd.sparse_vd(log_sigma2=-4.0))


def whole_state(net):
    """Of a net, and of what torch keeps beside it."""
    values = [t.tolist() for t in net.state_dict().values()]
    torchs = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    return state(net), values, torchs, depth, noise_source(), torch.get_rng_state().tolist()


CASES = {
    "draws of a chain": (chain, lambda net, s: predict(net, X, 8, seed=s).draws),
    "draws under vmap": (residual, lambda net, s: predict(net, X, 8, seed=s).draws),
    "whole functions": (residual, lambda n, s: predict(n, X, 8, seed=s, draw="functions").draws),
    "mean": (chain, lambda net, s: predict(net, X, mode="mean").mean),
    "mean with noise of its own": (residual, lambda n, s: predict(n, X, mode="mean", seed=s).mean),
    "moments": (plain, lambda net, s: predict(net, X, 8, mode="moments", seed=s).probs),
    "one function": (plain, lambda net, s: draw(net, seed=s)(X)),
    "kappa": (chain, lambda net, s: unlabelled_kappa(net, X, seed=s)["0"]),
}


FROZEN = vd.freeze(noisy(residual).eval(), samples=5)
CASES["frozen"] = (chain, lambda net, s: FROZEN(X, seed=s).draws)


@pytest.fixture
def often():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("make, call", CASES.values(), ids=CASES)
def test_concurrent_calls_give_what_they_give_alone(make, call, often):
    net, threads, rounds = noisy(make).train(), 4, 6
    list(net.modules())[-1].eval()  # modes are left as they are
    alone = [call(net, seed).clone() for seed in range(threads)]
    before, found, barrier = whole_state(net), [], threading.Barrier(threads + 1)

    def work(seed):
        barrier.wait()
        for _ in range(rounds):
            found.append((seed, call(net, seed)))

    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(work, seed) for seed in range(threads)]
        barrier.wait()
        while not all(worker.done() for worker in workers):
            torch.rand(3)  # the global generator is anybody's
    assert len(found) == threads * rounds
    assert all(torch.equal(result, alone[seed]) for seed, result in found)
    assert whole_state(net)[:-1] == before[:-1]


def test_training_goes_on_in_another_thread(often):
    net = noisy(residual)
    elbo = vd.ELBO(net, vd.Categorical(), 100).train()
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.0)
    y, modes = torch.zeros(16, dtype=torch.long), []

    def train():
        for _ in range(15):
            elbo(X, y).loss.backward()
            optimizer.step()
            modes.append((net.norm.training, net.a.is_sampling, net.drop.training))

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(train)
        while not worker.done():
            predict(net, X, 4)
    assert modes == [(True, True, True)] * 15
    assert all(m.training for m in net.modules())


def test_unseeded_calls_follow_the_global_generator():
    net = noisy(residual)
    first, second = replay(lambda: [predict(net, X, 8).draws for _ in range(2)])
    assert torch.equal(predict(net, X, 8).draws, first)
    assert not torch.equal(first, second)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer to interrupt by")
# Python swallows an interrupt that comes while a callback of the collector or of a weak reference
# runs, torch's own among them, and pytest takes that for a fault.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make, call", CASES.values(), ids=CASES)
def test_an_interrupt_leaves_net_and_torch_as_they_were(make, call):
    net = noisy(make).train()
    call(net, 0)
    before, interrupted = whole_state(net), 0

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for attempt in range(40):
            with suppress(KeyboardInterrupt):  # it may also come between two calls
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + attempt))
                    call(net, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 0
    assert whole_state(net) == before


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("mean", "frozen")])
def test_an_interrupt_of_the_noise_itself_leaves_the_thread_its_own(name, where, monkeypatch):
    make, call = CASES[name]
    net, kind = noisy(make), type(draw_from(GeneratorNoise(0)))
    before, own = noise_source(), getattr(kind, where)

    def interrupted(*args):
        if where == "__enter__":
            own(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(net, 0)
    assert noise_source() is before
