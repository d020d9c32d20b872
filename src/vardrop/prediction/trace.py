"""The trace of a model: the operations of a forward pass as a torch.fx graph, and its rewriting."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Target
from torch.nn import functional

from vardrop._core.calls import Batch, call_arguments, tensors_in
from vardrop._core.modules import clone_modules
from vardrop._core.torch_private import has_plain_forward, tree_map
from vardrop.functional import (
    GeneratorNoise,
    RandomOpMode,
    TensorNoise,
    call_with_generator,
    draw_from,
)
from vardrop.prediction.eval_copy import GaussianLayer, is_stochastic, sample_gaussian

_Args = tuple[object, ...]
_Kwargs = dict[str, object]
BRANCHES = "its code branches on the values of tensors"


class NotTraceableError(Exception):
    """Why a model has no graph."""


def trace_model(net: nn.Module, x: Batch, leaves: Container[nn.Module] = ()) -> fx.Graph:
    """Record the operations of a forward pass on the examples x.

    Noisy modules, `leaves`, modules with hooks and modules of torch are single operations. Sizes
    are those of x, except the number of examples. Raises whatever the code of the forward raises
    when it is given proxies. Nothing outside this call changes, so that other threads may run
    models meanwhile, which `torch.fx.symbolic_trace` does not allow.
    """
    inputs = bind_inputs(net, x)
    recorder = _Recorder(net)
    stubs: dict[nn.Module, nn.Module] = {}
    for name, module in net.named_modules():
        kind = type(module)
        of_torch = kind.__module__.startswith("torch.nn") and kind is not nn.Sequential
        is_leaf = of_torch or is_stochastic(module) or not has_plain_forward(module)
        if is_leaf or module in leaves:
            stubs[module] = _LeafStub(module, name, recorder)
    noise = TensorNoise(torch.zeros)  # only sizes and types of the values matter
    with draw_from(GeneratorNoise(0)), draw_from(noise), RandomOpMode(recorder.draw):
        proxies = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                proxies[name] = proxy = recorder.create_proxy("placeholder", name, (), {})
                proxy.value = value.clone()
        output = clone_modules(net, stubs)(**proxies)
    recorder.graph.output(recorder.create_arg(output))
    return recorder.graph


class _Recorder(fx.Tracer):
    """Makes a node of every operation on a proxy, and computes its value for the examples."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.root, self.graph, self.tensor_attrs = net, fx.Graph(tracer_cls=_Recorder), {}
        self.modules = dict(net.named_modules())
        self.is_computing = False

    def proxy(self, node: fx.Node) -> _ValueProxy:
        """The proxy of a node."""
        return _ValueProxy(node, self)

    def create_proxy(
        self, kind: str, target: Target, args: _Args, kwargs: _Kwargs, *rest: Any, **options: Any
    ) -> _ValueProxy:
        """Record an operation and compute its value."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        assert isinstance(proxy, _ValueProxy)
        if kind == "get_attr":
            proxy.value = operator.attrgetter(str(target))(self.root)
        if not kind.startswith("call"):
            return proxy
        args, kwargs = tree_map(
            lambda a: a.value if isinstance(a, _ValueProxy) else a, (args, kwargs)
        )
        self.is_computing, before = True, self.is_computing
        try:
            if not isinstance(target, str):
                proxy.value = target(*args, **kwargs)
            elif kind == "call_module":
                proxy.value = self.modules[target](*args, **kwargs)
            else:
                proxy.value = getattr(args[0], target)(*args[1:], **kwargs)
        finally:
            self.is_computing = before
        return proxy

    def draw(self, function: Any, args: _Args, kwargs: _Kwargs) -> object:
        """Noise of recorded operations; other noise would be a constant of the graph."""
        if not self.is_computing:
            name = function.overloadpacket.__name__
            raise NotTraceableError(f"its forward calls {name} on no input")
        return call_with_generator(function, args, kwargs)


class _ValueProxy(fx.Proxy):
    """A proxy with a value, so that code may ask for sizes and types."""

    value: Any

    @property
    def shape(self) -> tuple[_ValueProxy | int, ...]:
        """Sizes, of which the first is a proxy, because it is the number of examples."""
        sizes = tuple(self.value.shape)
        return (self.tracer.create_proxy("call_method", "size", (self, 0), {}), *sizes[1:])

    def size(self, dim: int | None = None) -> tuple[_ValueProxy | int, ...] | _ValueProxy | int:
        """One or all of the sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        is_constant = name in ("dim", "ndim", "dtype", "device")
        return getattr(self.value, name) if is_constant else super().__getattr__(name)

    def __bool__(self) -> bool:
        raise NotTraceableError(BRANCHES)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[fx.Proxy]:
        return (operator.getitem(self, i) for i in range(len(self.value)))


class _LeafStub(nn.Module):
    """Replaces a module that is one operation, and records its call."""

    def __init__(self, module: nn.Module, name: str, recorder: _Recorder) -> None:
        super().__init__()
        self.__dict__.update(module=module, name=name, recorder=recorder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: object, **kwargs: object) -> _ValueProxy:
        """Record a call of the module."""
        return self.recorder.create_proxy("call_module", self.name, args, kwargs)


def bind_inputs(net: nn.Module, x: Batch) -> _Kwargs:
    """The arguments of a batch by the names that the forward of the model gives them."""
    if isinstance(net, torch.jit.ScriptModule):
        raise NotTraceableError("it is a TorchScript module")
    args, kwargs = call_arguments(net, x)
    signature = inspect.signature(net.forward)
    bound = signature.bind(*args, **kwargs).arguments
    kinds = {signature.parameters[name].kind for name in bound}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise NotTraceableError("its forward takes a variable number of arguments")
    if any(tensors_in(value) and not isinstance(value, Tensor) for value in bound.values()):
        raise NotTraceableError("one of its arguments holds several tensors")
    return dict(bound)


_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batchnorm(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Fold BatchNorm into the Gaussian convolution in front of it.

    A dense layer is left alone: on inputs (N, T, features) its BatchNorm1d normalizes axis 1.
    """
    calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
    for node in list(graph.nodes):
        norm: Any = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(norm) not in _BATCHNORMS or norm.running_mean is None:
            continue
        before = node.args[0]
        layer = modules.get(str(before.target)) if before.op == "call_module" else None
        once = len(before.users) == 1 and calls.count(str(before.target)) == 1
        if isinstance(layer, GaussianLayer) and layer.variance.dim() > 2 and once:
            scale = torch.rsqrt(norm.running_var + norm.eps)
            scale = scale if norm.weight is None else scale * norm.weight
            shift = -norm.running_mean * scale
            layer.scale_outputs(scale, shift if norm.bias is None else shift + norm.bias)
            node.replace_all_uses_with(before)
            graph.erase_node(node)


_RELU_FUNCTIONS = (torch.relu, functional.relu)
_NEW_TENSORS = (sample_gaussian, operator.add, torch.add)  # their result belongs to nobody else
_NEW_OUTPUTS = (GaussianLayer, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_BATCHNORMS)


def overwrite_relu_inputs(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Let ReLU write into its input if nothing else reads that, because new memory costs more."""
    for node in list(graph.nodes):
        is_module = node.op == "call_module" and type(modules[str(node.target)]) is nn.ReLU
        is_function = node.op == "call_function" and node.target in _RELU_FUNCTIONS
        if not is_module and not is_function:
            continue
        x = node.args[0]
        is_new = x.op == "call_function" and x.target in _NEW_TENSORS
        is_new |= x.op == "call_module" and isinstance(modules[str(x.target)], _NEW_OUTPUTS)
        if is_new and len(x.users) == 1:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(torch.relu_, (x,)))
            graph.erase_node(node)
