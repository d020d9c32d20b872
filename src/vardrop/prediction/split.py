"""A model split at its first noise: the part in front runs once for all draws.

`trace_model` records the operations of a forward pass as a torch.fx graph. `split_at_noise` marks
the values that depend on noise and cuts the graph in two. The second part runs on (draws * N)
examples: a noisy layer on an unmarked value draws that many outputs from its mean and standard
deviation, and an unmarked value that meets a marked one is repeated.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Target
from torch.nn import functional

from vardrop._core.calls import Batch, call_arguments, map_tensors, tensors_in
from vardrop._core.modules import clone_modules
from vardrop._core.torch_private import has_plain_forward, tree_map
from vardrop.functional import GeneratorNoise, RandomOpMode, call_with_generator, draw_from
from vardrop.prediction.eval_copy import is_stochastic
from vardrop.prediction.gaussian_layer import GaussianLayer, sample_rows

_Args = tuple[object, ...]
_Kwargs = dict[str, object]
BRANCHES = "its code branches on the values of tensors"


class NotTraceableError(Exception):
    """Why a model has no graph."""


_Result = TypeVar("_Result")


def attempt(run: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """The result, or None and the reason why there is none.

    The model's code runs on proxies and on other batches than the user's, so it may raise any
    exception. It then runs on the user's own batch, where its errors reach the user.
    """
    try:
        with torch.no_grad():
            return run(), ""
    except Exception as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[0]


def trace_model(net: nn.Module, x: Batch, leaves: Container[nn.Module] = ()) -> fx.Graph:
    """Record the operations of a forward pass on the examples x.

    Noisy modules, `leaves`, modules with hooks and modules of torch are single operations. Sizes
    are those of x, except the number of examples. Raises whatever the code of the forward raises
    when it is given proxies. Nothing outside this call changes, so that other threads may run
    models meanwhile, which `torch.fx.symbolic_trace` does not allow.
    """

    def is_leaf(module: nn.Module) -> bool:
        kind = type(module)
        of_torch = kind.__module__.startswith("torch.nn") and kind is not nn.Sequential
        return of_torch or is_stochastic(module) or not has_plain_forward(module)

    inputs = _bind_inputs(net, x)
    recorder = _Recorder(net)
    stubs = {
        module: _LeafStub(module, name, recorder)
        for name, module in net.named_modules()
        if module in leaves or is_leaf(module)
    }
    with draw_from(GeneratorNoise(0)), RandomOpMode(recorder.draw):
        proxies = {
            name: recorder.add_input(name, value) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
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

    def add_input(self, name: str, value: Tensor) -> fx.Proxy:
        """A proxy for an argument."""
        proxy: _ValueProxy = self.create_proxy("placeholder", name, (), {})
        proxy.value = value.clone()
        return proxy

    def proxy(self, node: fx.Node) -> _ValueProxy:
        """The proxy of a node."""
        return _ValueProxy(node, self)

    def create_proxy(
        self, kind: str, target: Target, args: _Args, kwargs: _Kwargs, *rest: Any, **options: Any
    ) -> _ValueProxy:
        """Record an operation and compute its value."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        assert isinstance(proxy, _ValueProxy)
        if kind in ("call_function", "call_method", "call_module"):
            proxy.value = self._compute(kind, target, args, kwargs)
        elif kind == "get_attr":
            proxy.value = operator.attrgetter(str(target))(self.root)
        return proxy

    def _compute(self, kind: str, target: Target, args: _Args, kwargs: _Kwargs) -> Any:
        def to_value(a: object) -> object:
            return a.value if isinstance(a, _ValueProxy) else a

        args, kwargs = tree_map(to_value, args), tree_map(to_value, kwargs)
        self.is_computing, before = True, self.is_computing
        try:
            if not isinstance(target, str):
                return target(*args, **kwargs)
            if kind == "call_module":
                return self.modules[target](*args, **kwargs)
            return getattr(args[0], target)(*args[1:], **kwargs)
        finally:
            self.is_computing = before

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

    def dim(self) -> int:
        """Number of axes."""
        return int(self.value.dim())

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.dim()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.value.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self.value.device  # type: ignore[no-any-return]

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


def _bind_inputs(net: nn.Module, x: Batch) -> _Kwargs:
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


class Split(NamedTuple):
    """The two parts of a model.

    `prefix(x)` returns the values that the second part needs; `suffix(draws, *values)` returns what
    the model returns, for draws * N examples.
    """

    prefix: Callable[[Batch], Sequence[Any]]
    suffix: Callable[..., Any]
    moments: frozenset[int] = frozenset()  # places of the values that are moments of a layer


def split_at_noise(net: nn.Module, graph: fx.Graph, sources: set[nn.Module]) -> Split:
    """Cut the graph of a model at the modules that are `sources` of noise."""
    modules = dict(net.named_modules())
    marked: set[fx.Node] = set()
    for node in graph.nodes:
        is_source = node.op == "call_module" and modules[str(node.target)] in sources
        if is_source or any(n in marked for n in node.all_input_nodes):
            marked.add(node)
    if not any(node.op == "output" and node in marked for node in graph.nodes):
        raise NotTraceableError("its output has no noise")
    _fold_batchnorm(graph, modules)
    for name, module in modules.items():
        if isinstance(module, GaussianLayer):
            modules[name] = module.to_fast_layout()
    builder = _SplitBuilder(net, modules, marked)
    for node in graph.nodes:
        builder.add(node)
    return builder.finish()


class _SplitBuilder:
    """Copies the nodes of a graph into a prefix and a suffix."""

    def __init__(self, net: nn.Module, modules: dict[str, nn.Module], marked: set[fx.Node]) -> None:
        self.net, self.modules, self.marked = net, modules, marked
        self.prefix, self.suffix = fx.Graph(), fx.Graph()
        self.draws = self.suffix.placeholder("draws")
        self.unmarked_nodes: dict[fx.Node, fx.Node] = {}
        self.marked_nodes: dict[fx.Node, fx.Node] = {}
        self.values: list[fx.Node] = []  # of the prefix, that the suffix takes
        self.moments: set[int] = set()

    def add(self, node: fx.Node) -> None:
        """Copy one node into the part it belongs to."""
        layer = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if node not in self.marked:
            self.unmarked_nodes[node] = self.prefix.node_copy(node, self.unmarked_nodes.__getitem__)
        elif (
            isinstance(layer, GaussianLayer)
            and len(node.args) == 1
            and node.args[0] not in self.marked
        ):
            self.marked_nodes[node] = self._sample_first(node)
        else:
            self.marked_nodes[node] = self.suffix.node_copy(node, self._to_suffix)

    def _sample_first(self, node: fx.Node) -> fx.Node:
        """Compute the moments of a layer once, and draw from them for every draw."""
        name = f"moments_{len(self.values)}"
        self.modules[name] = _Moments(self.modules[str(node.target)])
        (x,) = node.args
        moments = self.prefix.call_module(name, (self.unmarked_nodes[x],))  # type: ignore[index]
        mean, std = (self.prefix.call_function(operator.getitem, (moments, i)) for i in (0, 1))
        self.moments |= {len(self.values), len(self.values) + 1}
        return self.suffix.call_function(
            sample_rows, (self._take(mean), self._take(std), self.draws)
        )

    def _take(self, value: fx.Node) -> fx.Node:
        self.values.append(value)
        return self.suffix.placeholder(f"value_{len(self.values)}")

    def _to_suffix(self, node: fx.Node) -> fx.Node:
        if node not in self.marked_nodes:
            taken = self._take(self.unmarked_nodes[node])
            self.marked_nodes[node] = self.suffix.call_function(repeat_rows, (taken, self.draws))
        return self.marked_nodes[node]

    def finish(self) -> Split:
        """The two parts as modules that share the modules and tensors of the model."""
        self.prefix.output(tuple(self.values))
        _overwrite_relu_inputs(self.suffix, self.modules)
        prefix, suffix = self._compile(self.prefix), self._compile(self.suffix)

        def run_prefix(x: Batch) -> Sequence[Any]:
            inputs = _bind_inputs(self.net, x)
            return prefix(*(value for value in inputs.values() if isinstance(value, Tensor)))

        return Split(run_prefix, suffix, frozenset(self.moments))

    def _compile(self, graph: fx.Graph) -> fx.GraphModule:
        targets = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
        root = {
            name: self.modules.get(name) or operator.attrgetter(name)(self.net) for name in targets
        }
        return fx.GraphModule(root, graph).eval()


class _Moments(nn.Module):
    """Mean and standard deviation of a Gaussian layer's output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments."""
        return self.layer.moments(x)  # type: ignore[operator, no-any-return]


class Examples(NamedTuple):
    """A value with examples along axis 0, next to values without."""

    batch: object


def repeat_rows(value: object, draws: int) -> Any:
    """Repeat the examples of a value for every draw; other values are returned unchanged.

    The result is a new tensor, because code after it may write into it.
    """
    if not isinstance(value, Examples):
        return value
    if draws == 1:
        return map_tensors(
            Tensor.clone, value.batch
        )  # keeps the memory layout, which repeat does not
    return map_tensors(
        lambda t: t.repeat(draws, *(1,) * (t.dim() - 1)) if t.dim() else t, value.batch
    )


_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _fold_batchnorm(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Fold BatchNorm into the Gaussian convolution in front of it.

    A dense layer is left alone: on inputs (N, T, features) its BatchNorm1d normalizes axis 1.
    """
    calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
    for node in list(graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, _BATCHNORMS) or type(norm) not in _BATCHNORMS:
            continue
        if norm.running_mean is None or norm.running_var is None:
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
_NEW_TENSORS = (sample_rows, operator.add, torch.add)  # their result belongs to nobody else
_NEW_OUTPUTS = (GaussianLayer, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_BATCHNORMS)


def _overwrite_relu_inputs(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
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
