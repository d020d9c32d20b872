"""Checks of one plain layer under one recipe. Each raises an AssertionError if it fails."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vardrop.conversion import convert, revert
from vardrop.functional.fast.switch import reference
from vardrop.layers import Variational
from vardrop.noisy import kl, noisy_modules, sampling
from vardrop.objective import ELBO
from vardrop.recipes import BaseRecipe

Make = Callable[[], nn.Module]
Inputs = tuple[Tensor, ...]
Check = Callable[[Make, Inputs, BaseRecipe], None]


def _noisy(make: Make, recipe: BaseRecipe) -> Variational:
    layer = convert(make(), recipe)
    assert isinstance(layer, Variational)
    return layer


def _out(layer: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The output of a layer, the first of several."""
    return _first(layer(*inputs))


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _torch_can(action: Callable[[], object]) -> bool:
    """Whether the torch layer supports a transformation. If not, a noisy layer need not either."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except (RuntimeError, UserWarning):
        return False
    return True


def check_mean_mode(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """With noise off, outputs are bit-identical to the torch layer with the mean weights.

    A gate multiplies its side by the expected multiplier. `revert` folds that into the weights, or
    raises an error if the multiplier depends on the features.
    """
    layer = _noisy(make, recipe).eval()
    output, gate = _out(layer, inputs), layer.gate
    if gate is None or type(layer).new_gate is Variational.new_gate:  # no gate inside the layer
        plain, state = make().eval(), layer.state_dict()
        plain.load_state_dict({name: state[name] for name in plain.state_dict()})
        x = layer.apply_gate("input", inputs[0])
        expected = layer.apply_gate("output", _out(plain, (x, *inputs[1:])))
        assert torch.equal(output, expected), "mean mode differs from the torch layer of the means"
    if gate is not None and gate.noise.input_dependent:
        return
    plain = revert(copy.deepcopy(layer))
    assert type(plain) is type(make()), f"revert leaves a {type(plain).__name__}"
    if gate is None:
        assert torch.equal(_out(plain, inputs), output), "revert differs from mean mode"
    else:  # scaled weights and scaled features round differently
        torch.testing.assert_close(_out(plain, inputs), output, rtol=1e-4, atol=1e-5)


def check_noise(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Two draws differ, `sampling` switches the noise, and the mode of the layer is unchanged."""
    layer = _noisy(make, recipe).eval()
    with sampling(layer):  # discrete noise may repeat a few draws
        draws = [_out(layer, inputs) for _ in range(32)]
    assert any(not torch.equal(draws[0], draw) for draw in draws), "all draws are equal"
    assert not layer.training
    assert torch.equal(_out(layer, inputs), _out(layer, inputs)), "noise stays on after sampling()"
    with sampling(layer.train(), on=False):
        same = torch.equal(_out(layer, inputs), _out(layer, inputs))
    assert same, "sampling(on=False) draws noise"


def check_plain_checkpoint(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """A plain checkpoint loads, only noise keys are missing, and no tensor is stored twice."""
    layer, plain = _noisy(make, recipe), make().state_dict()
    keys = layer.load_state_dict(plain, strict=False)
    assert not keys.unexpected_keys, f"unexpected {keys.unexpected_keys}"
    assert not set(keys.missing_keys) & set(plain), f"misses {keys.missing_keys}"
    addresses = [t.data_ptr() for t in layer.state_dict().values() if t.numel()]
    assert len(addresses) == len(set(addresses)), "a tensor of the state_dict is stored twice"


def check_copies(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """deepcopy, pickle and torch.save with weights_only restore a layer, also after a forward."""
    layer, loaded = _noisy(make, recipe), _noisy(make, recipe)
    _out(layer, inputs)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        with torch.random.fork_rng():
            expected = _out(layer, inputs)
        with torch.random.fork_rng():
            same = torch.equal(expected, _out(twin.train(layer.training), inputs))
        assert same, "a copy draws other noise from the same seed"


def check_gradients(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Every trainable tensor gets a finite gradient from ten draws and the KL."""
    layer = _noisy(make, recipe).train()
    losses = [_out(layer, inputs).square().mean() for _ in range(10)]
    (torch.stack(losses).mean() + kl(layer)).backward()
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None or not parameter.requires_grad, f"no gradient for {name}"
        assert grad is None or grad.isfinite().all(), f"the gradient of {name} is not finite"


def check_stored_noise(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """The gradient of ten draws in one step is the sum of the gradients of these draws.

    The noise is moved away from its bounds, at which the gradient of a step may be clamped.
    """
    layer = _noisy(make, recipe).train()
    with torch.no_grad():
        for tensor in (t for m in noisy_modules(layer).values() for t in m.noise_tensors()):
            tensor.sub_(0.1)
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def gradient(draws: int) -> list[Tensor]:
        loss = torch.stack([_out(layer, inputs).square().sum() for _ in range(draws)]).sum()
        return list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    with torch.random.fork_rng():
        one_step = gradient(10)
    with torch.random.fork_rng():
        ten_steps = [gradient(1) for _ in range(10)]
    for mine, *others in zip(one_step, *ten_steps, strict=True):
        expected = torch.stack(others).sum(0)
        largest = expected.abs().max().clamp(min=1e-12)
        assert (mine - expected).abs().max() / largest <= 1e-5, "gradients of draws do not add up"


@torch.random.fork_rng()
def check_reset(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """`reset_parameters` initializes weights and noise, also of a layer from the meta device."""
    torch.manual_seed(0)
    fresh = _noisy(make, recipe).state_dict()
    with torch.device("meta"):
        empty = _noisy(make, recipe).to_empty(device="cpu")
    for layer in (_noisy(make, recipe), empty):
        with torch.no_grad():
            for tensor in (*layer.parameters(), *layer.buffers()):
                tensor.fill_(99)
        torch.manual_seed(0)
        layer.reset_parameters()
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, fresh[name]), f"{name} is not reset"


class _Objective(nn.Module):
    """A smooth function of all parameters of a layer in float64, for one fixed draw."""

    def __init__(self, make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
        super().__init__()
        self.layer = _noisy(lambda: make().double(), recipe).eval()
        self.inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        trainable = {n: p.detach() for n, p in self.named_parameters() if p.requires_grad}
        # Some parameters start at a bound, where the function is not smooth.
        self.start = {name: (p - 0.1).requires_grad_() for name, p in trainable.items()}
        self.direction = {name: torch.randn_like(p) for name, p in trainable.items()}

    def forward(self) -> Tensor:
        return _out(self.layer, self.inputs).sin().sum() + kl(self.layer)

    def at(self, point: dict[str, Tensor]) -> Tensor:
        with torch.random.fork_rng(), sampling(self.layer):
            torch.manual_seed(0)
            return functional_call(self, point, ())

    def gradient(self, step: float = 0.0, create_graph: bool = False) -> tuple[Tensor, ...]:
        """The gradient at the start, moved by a step in the direction."""
        point = {name: p + step * self.direction[name] for name, p in self.start.items()}
        return torch.autograd.grad(
            self.at(point), list(point.values()), create_graph=create_graph, materialize_grads=True
        )

    def slope(self, create_graph: bool = False) -> Tensor:
        """The derivative at the start in the direction."""
        pairs = zip(self.gradient(create_graph=create_graph), self.direction.values(), strict=True)
        return torch.stack([(gradient * d).sum() for gradient, d in pairs]).sum()


def check_forward_mode(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Forward-mode derivatives (`torch.func.jvp`) equal reverse-mode derivatives."""
    objective = _Objective(make, inputs, recipe)
    if not objective.start or getattr(make(), "padding_idx", None) is not None:
        return  # the two modes of torch's own embedding differ at the padding index
    start = {name: p.detach() for name, p in objective.start.items()}
    forwards = torch.func.jvp(objective.at, (start,), (objective.direction,))[1]
    torch.testing.assert_close(forwards, objective.slope(), rtol=1e-8, atol=1e-10)


def check_second_derivatives(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """The derivative of the gradient agrees with finite differences of the gradient."""
    objective, step = _Objective(make, inputs, recipe), 1e-6
    gate = objective.layer.gate
    if not objective.start or (gate is not None and gate.noise.input_dependent):
        return  # such a gate reads features without a gradient, so that differences disagree
    slope, start = objective.slope(create_graph=True), list(objective.start.values())
    second = torch.autograd.grad(slope, start, materialize_grads=True)
    gradients = zip(*(objective.gradient(k * step) for k in (-2, -1, 1, 2)), strict=True)
    expected = tuple((8 * (c - b) - (d - a)) / (12 * step) for a, b, c, d in gradients)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


def check_compile(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """One graph in training and in evaluation, without recompilation for a call or a new beta."""
    plain = make().eval()
    if not _torch_can(lambda: torch.compile(plain, fullgraph=True, backend="eager")(*inputs)):
        return
    layer = _noisy(make, recipe)
    elbo = ELBO(layer, lambda out, _: _first(out).square().mean(), num_data=10)
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    if len(inputs) == 1:
        compiled = torch.compile(elbo, fullgraph=True, backend=backend)
        for beta in (1.0, 0.5):
            elbo.set_beta(beta)
            compiled(inputs[0], None).loss.backward()
        assert len(graphs) == 1, f"{len(graphs)} graphs for two training steps"
    graphs.clear()
    evaluated = torch.compile(layer.eval(), fullgraph=True, backend=backend)
    for _ in range(2):
        same = torch.equal(_out(evaluated, inputs), _out(layer, inputs))
        assert same, "the compiled mean differs"
    assert len(graphs) == 1, f"{len(graphs)} graphs for two evaluations"


def check_vmap(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """vmap over draws gives different draws of the right shape."""
    batches, plain = tuple(torch.stack([x, x]) for x in inputs), make().eval()
    if not _torch_can(lambda: torch.vmap(plain)(*batches)):
        return
    layer = _noisy(make, recipe).eval()
    with sampling(layer), torch.no_grad():
        draws = torch.vmap(lambda _: _out(layer, inputs), randomness="different")(torch.empty(32))
        assert draws.shape == (32, *_out(layer, inputs).shape)
    assert any(not torch.equal(draws[0], draw) for draw in draws), "vmap repeats one draw"


def check_export(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """torch.export of the mean computes the mean."""
    if not _torch_can(lambda: torch.export.export(make().eval(), inputs)):
        return
    layer = _noisy(make, recipe).eval()
    program = torch.export.export(layer, inputs)
    torch.testing.assert_close(_out(program.module(), inputs), _out(layer, inputs))


def check_autocast(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Loss and gradients are finite under bfloat16 and float16 autocast, also for zero inputs."""
    for dtype in (torch.bfloat16, torch.float16):
        autocast = torch.autocast("cpu", dtype=dtype)
        if not _torch_can(autocast(partial(make(), *inputs))):
            continue
        for batch in (inputs, tuple(torch.zeros_like(x) for x in inputs)):
            layer = _noisy(make, recipe).train()
            with autocast:
                loss = _out(layer, batch).float().square().mean() + kl(layer)
            loss.backward()
            assert torch.isfinite(loss), f"the loss is not finite in {dtype}"
            gradients = [p.grad for p in layer.parameters() if p.grad is not None]
            assert all(g.isfinite().all() for g in gradients), f"no finite gradient in {dtype}"


def check_kl_is_a_sum(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Two such layers have twice the KL. One layer used twice has it once."""
    layer = _noisy(make, recipe)
    with torch.random.fork_rng():
        one = kl(layer)
    with torch.random.fork_rng():
        tied = kl(nn.ModuleList([layer, layer]))
    assert torch.equal(one, tied), "a shared module counts twice"
    if layer.prior is not None and type(layer.prior).__name__ != "MonteCarlo":
        torch.testing.assert_close(kl(nn.ModuleList([layer, copy.deepcopy(layer)])), 2 * one)


def check_reference(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Output, KL and gradients are the same with and without fast paths, for the same noise."""
    layer = _noisy(make, recipe).train()
    elbo = ELBO(layer, lambda output, _: _first(output).square().mean(), num_data=10)
    trainable = [p for p in layer.parameters() if p.requires_grad]

    steps = []
    for paths in (nullcontext(), reference()):
        with paths, torch.random.fork_rng():
            out = elbo(inputs[0] if len(inputs) == 1 else inputs, None)
            gradients = torch.autograd.grad(out.loss, trainable, materialize_grads=True)
        steps.append([out.nll, out.kl, *gradients])
    for mine, expected in zip(*steps, strict=True):
        largest = expected.abs().max().clamp(min=1e-6)
        assert (mine - expected).abs().max() / largest <= 1e-5, "a fast path differs"


# Every function of this module whose name begins with check_, without that prefix.
CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def check_layer(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Run every check on one plain layer under one recipe.

    Args:
        make: makes the plain layer.
        inputs: of the layer.
        recipe: the method.

    >>> import torch, vardrop as vd
    >>> from vardrop.testing import check_layer
    >>> check_layer(lambda: torch.nn.Linear(4, 3), (torch.randn(5, 4),), vd.sparse_vd())
    """
    for check in CHECKS.values():
        check(make, inputs, recipe)
