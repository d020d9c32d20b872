"""Checks of one plain layer under one recipe; each raises AssertionError with what failed."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
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
_Loss = Callable[..., Tensor]


def _noisy(make: Make, recipe: BaseRecipe) -> Variational:
    layer = convert(make(), recipe)
    assert isinstance(layer, Variational)
    return layer


def _out(layer: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The output of a layer, the first of several."""
    return _first(layer(*inputs))


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


def _torch_can(action: Callable[[], object]) -> bool:
    """Whether torch's own layer goes through a transformation: more is not asked of a noisy one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except (RuntimeError, UserWarning):
        return False
    return True


def _expected_plain(layer: Variational, make: Make) -> nn.Module:
    plain = make()
    own = layer.state_dict()
    plain.load_state_dict({k: own[k] for k in plain.state_dict()})
    return plain.eval()


def check_mean_mode(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """With noise off the layer is the torch layer of its means, bit for bit.

    A gate multiplies its side by the expected multiplier; `revert` folds that into the weights,
    or refuses where the multiplier depends on the features.
    """
    layer = _noisy(make, recipe).eval()
    found, gate = _out(layer, inputs), layer.gate
    inner = gate is not None and type(layer).new_gate is not Variational.new_gate
    if not inner:  # what a gate inside the layer does is known by what `revert` makes of it
        expected = _mean_output(layer, _expected_plain(layer, make), inputs)
        assert torch.equal(found, expected), "mean mode differs from the torch layer of the means"
    if gate is not None and gate.noise.input_dependent:
        return
    plain = revert(copy.deepcopy(layer))
    assert type(plain) is type(make()), f"revert leaves a {type(plain).__name__}"
    if gate is None:
        assert torch.equal(_out(plain, inputs), found), "revert differs from mean mode"
    else:  # scaled weights round otherwise than scaled features
        torch.testing.assert_close(_out(plain, inputs), found, rtol=1e-4, atol=1e-5)


def _mean_output(layer: Variational, plain: nn.Module, inputs: Inputs) -> Tensor:
    gate = layer.gate
    if gate is None:
        return _out(plain, inputs)

    def gated(x: Tensor) -> Tensor:
        mean = gate.noise.mean(x, gate.axis, gate.tensors)
        return x if mean is None else x * mean

    if gate.side == "output":
        return gated(_out(plain, inputs))
    return plain(gated(inputs[0]), *inputs[1:])


def check_noise(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Two draws differ, noise follows the switch, and the layer's mode is left as it was."""
    layer = _noisy(make, recipe).eval()
    with sampling(layer):
        draws = [_out(layer, inputs) for _ in range(32)]  # discrete noise may repeat a draw or two
        assert any(not torch.equal(draws[0], d) for d in draws), "all draws are equal"
    assert not layer.training
    assert torch.equal(_out(layer, inputs), _out(layer, inputs)), "noise stays on after sampling()"
    layer.train()
    with sampling(layer, on=False):
        assert torch.equal(_out(layer, inputs), _out(layer, inputs)), (
            "sampling(on=False) draws noise"
        )


def check_plain_checkpoint(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """A plain checkpoint loads, missing only noise keys, and no tensor is stored twice."""
    layer, plain = _noisy(make, recipe), make().state_dict()
    result = layer.load_state_dict(plain, strict=False)
    assert not result.unexpected_keys, f"unexpected {result.unexpected_keys}"
    assert not set(result.missing_keys) & set(plain), f"misses {result.missing_keys}"
    addresses = [t.data_ptr() for t in layer.state_dict().values() if t.numel()]
    assert len(addresses) == len(set(addresses)), "a state_dict entry stands twice"


def check_copies(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """deepcopy, pickle and torch.save + weights_only bring back the same layer, after a forward."""
    layer = _noisy(make, recipe)
    _out(layer, inputs)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = _noisy(make, recipe)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        twin.train(layer.training)
        with torch.random.fork_rng():
            mine = _out(layer, inputs)
        with torch.random.fork_rng():
            assert torch.equal(mine, _out(twin, inputs)), (
                "a copy draws other noise from the same seed"
            )


def check_gradients(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Every trainable tensor gets a finite gradient from ten draws and the KL."""
    layer = _noisy(make, recipe).train()
    total = torch.stack([_out(layer, inputs).square().mean() for _ in range(10)]).mean() + kl(layer)
    total.backward()
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"


def check_stored_noise(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Ten draws in one step have the gradient of the same ten draws taken one at a time.

    Away from bounds on the noise, where the gradient of a whole step is what may be held back.
    """
    layer = _noisy(make, recipe).train()
    with torch.no_grad():
        for tensor in (t for m in noisy_modules(layer).values() for t in m.noise_tensors()):
            tensor.sub_(0.1)
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def gradients(losses: list[Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(torch.stack(losses).sum(), parameters, allow_unused=True)
        pairs = zip(parameters, grads, strict=True)
        return [torch.zeros_like(p) if g is None else g for p, g in pairs]

    with torch.random.fork_rng():
        together = gradients([_out(layer, inputs).square().sum() for _ in range(10)])
    with torch.random.fork_rng():
        apart = [gradients([_out(layer, inputs).square().sum()]) for _ in range(10)]
    for mine, *others in zip(together, *apart, strict=True):
        expected = torch.stack(others).sum(0)
        scale = expected.abs().max().clamp(min=1e-12)
        assert ((mine - expected).abs().max() / scale) <= 1e-5, "gradients of draws do not add up"


@torch.random.fork_rng()
def check_reset(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """`reset_parameters` starts weights and noise anew, also of a layer from the meta device."""
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
            assert torch.equal(tensor, fresh[name]), f"{name} does not start anew"


def _objective(make: Make, inputs: Inputs, recipe: BaseRecipe) -> tuple[_Loss, list[Tensor]]:
    """A smooth function of the parameters in float64, by a fixed draw, and where to take it."""
    layer = _noisy(lambda: make().double(), recipe).eval()
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Tensor:
            return _out(self.layer, inputs).sin().sum() + kl(self.layer)

    def value(*parameters: Tensor) -> Tensor:
        found = {f"layer.{n}": p for n, p in zip(names, parameters, strict=True)}
        with torch.random.fork_rng(), sampling(layer):
            torch.manual_seed(0)
            return functional_call(Loss(), found, ())

    # A little below where it starts: some parameters start at a bound, where nothing is smooth.
    return value, [p.detach() - 0.1 for p in layer.parameters() if p.requires_grad]


def _gradient(value: _Loss, at: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    return list(
        torch.autograd.grad(value(*at), at, create_graph=create_graph, materialize_grads=True)
    )


def check_forward_mode(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Derivatives carried forwards (`torch.func.jvp`) are those carried backwards."""
    value, at = _objective(make, inputs, recipe)
    ways = [torch.randn_like(p) for p in at]
    if not at or getattr(make(), "padding_idx", None) is not None:
        return  # torch's own look-up treats the row of padding otherwise in the two directions
    forwards = torch.func.jvp(value, tuple(at), tuple(ways))[1]
    gradient = _gradient(value, [p.requires_grad_() for p in at])
    backwards = torch.stack([(g * w).sum() for g, w in zip(gradient, ways, strict=True)]).sum()
    torch.testing.assert_close(forwards, backwards, rtol=1e-8, atol=1e-10)


def check_second_derivatives(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """The derivative of the gradient is what differences of the gradient say."""
    value, at = _objective(make, inputs, recipe)
    ways = [torch.randn_like(p) for p in at]
    with torch.random.fork_rng():
        gate = _noisy(make, recipe).gate
    if not at or (gate is not None and gate.noise.input_dependent):
        return  # such a gate reads features without a gradient, which differences do not know
    step = 1e-6

    def moved(by: float) -> list[Tensor]:
        return [(p + by * step * w).requires_grad_() for p, w in zip(at, ways, strict=True)]

    near, far = (
        [
            a - b
            for a, b in zip(_gradient(value, moved(k)), _gradient(value, moved(-k)), strict=True)
        ]
        for k in (1, 2)
    )
    start = moved(0)
    gradient = _gradient(value, start, create_graph=True)
    along = torch.stack([(g * w).sum() for g, w in zip(gradient, ways, strict=True)]).sum()
    found = torch.autograd.grad(along, start, materialize_grads=True)
    for mine, a, b in zip(found, near, far, strict=True):
        torch.testing.assert_close(mine, (8 * a - b) / (12 * step), rtol=1e-5, atol=1e-5)


def check_compile(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """One graph in training and in evaluation; no recompilation for a second call or a new beta."""
    plain = make().eval()
    if not _torch_can(lambda: torch.compile(plain, fullgraph=True, backend="eager")(*inputs)):
        return
    layer = _noisy(make, recipe)
    elbo = ELBO(layer, lambda out, _: _first(out).square().mean(), num_data=10)
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    arguments = inputs if len(inputs) == 1 else (inputs,)
    if len(inputs) == 1:
        compiled: Any = torch.compile(elbo, fullgraph=True, backend=backend)
        for beta in (1.0, 0.5):
            elbo.set_beta(beta)
            compiled(arguments[0], None).loss.backward()
        assert len(graphs) == 1, f"{len(graphs)} graphs for two training steps"
    once: Any = torch.compile(layer.eval(), fullgraph=True, backend=backend)
    graphs.clear()
    assert torch.equal(_out(once, inputs), _out(layer, inputs)), "the compiled mean differs"
    _out(once, inputs)
    assert len(graphs) == 1, f"{len(graphs)} graphs for two evaluations"


def check_vmap(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """vmap over draws gives different draws of the right shape."""
    batches, plain = tuple(torch.stack([x, x]) for x in inputs), make().eval()
    if not _torch_can(lambda: torch.vmap(plain)(*batches)):
        return
    layer = _noisy(make, recipe).eval()
    with sampling(layer), torch.no_grad():
        draws = torch.vmap(lambda _: _out(layer, inputs), randomness="different")(torch.empty(32))
        one = _out(layer, inputs)
    assert draws.shape == (32, *one.shape)
    assert any(not torch.equal(draws[0], d) for d in draws), "vmap repeats one draw"


def check_export(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """torch.export of the mean computes the mean."""
    if not _torch_can(lambda: torch.export.export(make().eval(), inputs)):
        return
    layer = _noisy(make, recipe).eval()
    program = torch.export.export(layer, inputs)
    torch.testing.assert_close(_out(program.module(), inputs), _out(layer, inputs))


def check_autocast(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Under bfloat16 and float16 autocast outputs, KL and gradients are finite, at zero too."""

    def plain(dtype: torch.dtype) -> None:
        with torch.autocast("cpu", dtype=dtype):
            make()(*inputs)

    for dtype in (torch.bfloat16, torch.float16):
        if not _torch_can(partial(plain, dtype)):
            continue
        for given in (inputs, tuple(torch.zeros_like(x) for x in inputs)):
            layer = _noisy(make, recipe).train()
            with torch.autocast("cpu", dtype=dtype):
                loss = _out(layer, given).float().square().mean() + kl(layer)
            loss.backward()
            assert torch.isfinite(loss), f"the loss is not finite in {dtype}"
            for name, parameter in layer.named_parameters():
                finite = parameter.grad is None or bool(torch.isfinite(parameter.grad).all())
                assert finite, f"the gradient of {name} is not finite in {dtype}"


def check_kl_is_a_sum(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Two such layers have twice the KL; one layer used twice has it once."""
    layer = _noisy(make, recipe)
    with torch.random.fork_rng():
        one = kl(layer)
    with torch.random.fork_rng():
        tied = kl(nn.ModuleList([layer, layer]))
    assert torch.equal(one, tied), "a shared module counts twice"
    if layer.prior is not None and type(layer.prior).__name__ != "MonteCarlo":
        two = kl(nn.ModuleList([layer, copy.deepcopy(layer)]))
        torch.testing.assert_close(two, 2 * one)
    assert noisy_modules(layer)


def check_reference(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Output, KL and gradients are the same with and without fast paths, for the same noise."""
    layer = _noisy(make, recipe).train()
    elbo = ELBO(layer, lambda output, _: _first(output).square().mean(), num_data=10)
    trained = [p for p in layer.parameters() if p.requires_grad]

    def step() -> list[Tensor]:
        with torch.random.fork_rng():
            out = elbo(inputs[0] if len(inputs) == 1 else inputs, None)
        gradients = torch.autograd.grad(out.loss, trained, materialize_grads=True)
        return [out.nll, out.kl, *gradients]

    fast = step()
    with reference():
        plain = step()
    for mine, expected in zip(fast, plain, strict=True):
        scale = expected.abs().max().clamp(min=1e-6)
        assert (mine - expected).abs().max() / scale <= 1e-5, "a fast path differs"


CHECKS: dict[str, Check] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_mean_mode,
        check_noise,
        check_plain_checkpoint,
        check_copies,
        check_gradients,
        check_reset,
        check_stored_noise,
        check_forward_mode,
        check_second_derivatives,
        check_compile,
        check_vmap,
        check_export,
        check_autocast,
        check_kl_is_a_sum,
        check_reference,
    )
}


def check_layer(make: Make, inputs: Inputs, recipe: BaseRecipe) -> None:
    """Run every check on one plain layer under one recipe.

    >>> import torch, vardrop as vd
    >>> from vardrop.testing import check_layer
    >>> check_layer(lambda: torch.nn.Linear(4, 3), (torch.randn(5, 4),), vd.sparse_vd())
    """
    for check in CHECKS.values():
        check(make, inputs, recipe)
