"""What every model of the zoo has to do, each as a function of its entry.

A model that a verb does not support gets a `VardropError`. Every other failure raises.
"""

import copy
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

import vardrop as vd
from vardrop._core.calls import call_net, clone_batch, tensors_in
from vardrop.compression.mask import zero_pruned_weights
from vardrop.noisy import named_modules_of

ROWS = 4


@torch.no_grad()
def run(entry, net, batch):
    return entry.pick(call_net(net, clone_batch(batch)))


@contextmanager
def fast_path_off():
    """Torch's encoder layers have another order of rounding in evaluation mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def convert(entry):
    """Means are those of the plain model; the share of the weights that are noisy."""
    plain = entry.build()
    net, batch = vd.convert(copy.deepcopy(plain), vd.bayes_by_backprop()).eval(), entry.batch(ROWS)
    with vd.sampling(net, False), fast_path_off():
        assert torch.equal(run(entry, net, batch), run(entry, plain, batch))
    noisy = {id(t.mean): t.mean.numel() for m in named_modules_of(net, vd.layers.Variational).values() for t in m.noisy_tensors().values()}  # fmt: skip
    return sum(noisy.values()) / sum(p.numel() for p in plain.parameters() if p.dim() > 1)


def elbo(entry):
    net, batch = vd.convert(entry.build(), vd.bayes_by_backprop()), entry.batch(ROWS)
    y = run(entry, net.eval(), batch)
    y = torch.zeros(len(y), *y.shape[2:], dtype=torch.long)
    options = {"num_data": 100, "output": entry.pick, "batched": entry.batched}
    loss_of = vd.ELBO(net.train(), vd.likelihoods.Categorical(), **options)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    loss = loss_of(batch, y).loss
    loss.backward()
    optimizer.step()
    assert bool(loss.isfinite())
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert grads
    assert all(bool(g.isfinite().all()) for g in grads)


def predict(entry):
    net = vd.convert(entry.build(), vd.bayes_by_backprop(log_sigma2=-5.0)).eval()
    batch = entry.batch(ROWS)
    p = vd.predict(net, batch, samples=3, seed=0, output=entry.pick, batched=entry.batched)
    assert p.probs.shape == run(entry, net, batch).shape
    assert float(p.epistemic.abs().max()) > 0


def train_mode(net):
    """A model whose dropout draws, and whose norms do not change."""
    net = copy.deepcopy(net).train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
    return net


def mc_dropout(entry):
    """Sampling draws the noise of the training mode, number for number."""
    plain, batch = entry.build(), entry.batch(ROWS)
    trained = train_mode(plain)
    torch.manual_seed(1)
    expected = run(entry, trained, batch)
    with fast_path_off():
        if torch.equal(expected, run(entry, plain, batch)):
            return  # a model without dropout
    net = vd.convert(plain, vd.mc_dropout(), example_input=batch)
    with vd.sampling(net):
        torch.manual_seed(1)
        assert torch.equal(run(entry, net, batch), expected), "some dropout does not draw"
    p = vd.predict(net, batch, samples=3, seed=0, output=entry.pick, batched=entry.batched)
    assert float(p.epistemic.abs().max()) > 0


def kill_by_gates(net, share=0.4):
    """Close the gates of the first inputs of every layer."""
    net = vd.convert(net, vd.l0()).eval()
    for gate in named_modules_of(net, vd.Gate).values():
        gate.logit.data.fill_(5.0)
        gate.logit.data[: int(share * gate.logit.shape[0])] = -20.0
    return net


def kill_by_noise(net, share=0.4):
    """Let the weights of the first outputs of every layer be noise only."""
    net = vd.convert(net, vd.sparse_vd()).eval()
    for layer in named_modules_of(net, vd.layers.Variational).values():
        for tensor in layer.noisy_tensors().values():
            axis = tensor.axes.output[0] if tensor.axes.output else 0
            width = getattr(layer, "hidden_size", tensor.mean.shape[axis])  # of each of its gates
            units = torch.arange(tensor.mean.shape[axis]) % width < int(share * width)
            for values, number in ((tensor.mean, 0.0), (tensor.noise["log_sigma2"], 8.0)):
                values.data.index_fill_(axis, units.nonzero().flatten(), number)
    return net


def numbers(net):
    return sum(p.numel() for p in net.parameters())


def shrink(entry, kill=kill_by_gates):
    """The small model has the outputs of the masked model on other examples; how many units go."""
    plain = entry.build()
    net, batch = kill(copy.deepcopy(plain)), entry.batch(ROWS)
    small, plan = vd.shrink(net, entry.batch(ROWS), progress=False)
    masked = zero_pruned_weights(net)[0]
    assert float((run(entry, small, batch) - run(entry, masked, batch)).abs().max()) < 1e-4
    assert numbers(small) <= numbers(plain), "more numbers than before"
    # Outputs of layers, or inputs that no embedding gives any more.
    sides = ((r.before, r.after) for r in plan.layers)
    removed = sum(b.outputs + b.inputs - a.outputs - a.inputs for b, a in sides)
    assert removed or plan.notes, "nothing removed without a reason"
    return removed


def to_feed(batch, session):
    names = [i.name for i in session.get_inputs()]
    if isinstance(batch, dict):
        return {name: batch[name].numpy() for name in names}
    return {n: t.numpy() for n, t in zip(names, tensors_in(batch), strict=True)}


def onnx(entry):
    """A graph with uncertainty, in another batch size; or the graph of the means."""
    import onnxruntime

    net = vd.convert(entry.build(), vd.bayes_by_backprop(log_sigma2=-5.0)).eval()
    predictor = vd.freeze(net, samples=4, output=entry.pick, batched=entry.batched)
    batch = entry.batch(ROWS + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        vd.export_onnx(predictor, entry.batch(ROWS), path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options)
        values = session.run(None, to_feed(batch, session))
    found = dict(zip(predictor.output_names, values, strict=True))
    options = {"output": entry.pick, "batched": entry.batched}
    mean = vd.predict(net, batch, samples=64, seed=0, **options).probs.numpy()
    assert found["probs"].shape == mean.shape
    assert np.abs(found["probs"] - mean).max() < 0.3
    assert found["epistemic"].max() > 0
