"""Random numbers: all draws of the library, from global generators or from those of one call.

By default they come from torch's global generators. Inside `draw_from(GeneratorNoise(seed))` they
come from generators of the calling thread, so that several threads draw independently and
repeatably. A compiled graph always draws from the global generators.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from vardrop._core.checks import check_integer
from vardrop._core.sharding import common_seed, is_sharded, shard_like
from vardrop._core.torch_private import (
    OpOverload,
    TorchDispatchMode,
    in_transform,
    save_modes,
    schema,
)
from vardrop.functional.fast import normal_table

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_Shape = tuple[int, ...] | torch.Size
_P = ParamSpec("_P")
_R = TypeVar("_R")
# Calls a random function of torch with these arguments.
Answer = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class Source(NamedTuple):
    """The noise of a thread: generators made from a seed, or a function that returns noise."""

    seed: int | None
    generators: dict[torch.device, torch.Generator]
    take: Callable[[_Shape], Tensor] | None


_GLOBAL = Source(None, {}, None)


class _Thread(threading.local):
    source = _GLOBAL


_thread = _Thread()


def noise_source() -> Source:
    """The noise source of the calling thread. A compiled graph uses torch's generators."""
    if torch.compiler.is_exporting():
        return _thread.source._replace(seed=None)
    return _GLOBAL if torch.compiler.is_compiling() else _thread.source


@dataclass(frozen=True)
class GeneratorNoise:
    """Noise from generators made from a seed, one per device. Global generators are unchanged.

    With the same `generators` a later block continues the sequence.

    Args:
        seed: of the generators.
        generators: generators by device, to which new ones are added.
    """

    seed: int
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorNoise:
    """Standard normal numbers from a function of their shape. Uniform numbers are made of them.

    Args:
        take: a function from a shape to standard normal numbers.
    """

    take: Callable[[_Shape], Tensor]


class draw_from(AbstractContextManager[None]):
    """Draw from another source in a block of this thread.

    It is a class, because a generator function that an interrupt abandons ends late.

    Args:
        noise: the source.

    >>> import torch
    >>> with draw_from(GeneratorNoise(0)):
    ...     first = uniform((2,), torch.zeros(()))
    >>> with draw_from(GeneratorNoise(0)):
    ...     bool((uniform((2,), torch.zeros(())) == first).all())
    True
    >>> with draw_from(TensorNoise(torch.zeros)):
    ...     standard_normal((2,), torch.ones(())), uniform((2,), torch.ones(()))
    (tensor([0., 0.]), tensor([0.5000, 0.5000]))
    """

    def __init__(self, noise: GeneratorNoise | TensorNoise) -> None:
        self.source = _thread.source._replace(**vars(noise))  # both have names of its fields

    def __enter__(self) -> None:
        self.before, _thread.source = _thread.source, self.source

    def __exit__(self, *_: object) -> None:
        _thread.source = self.before


def restore_state_on_error(verb: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to restore the modes and the noise of the thread after an error.

    An interrupt may come inside a context manager, before it restores the state.

    Args:
        verb: the function.

    Returns:
        The decorated function.
    """

    @wraps(verb)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        grad, source, restore_modes = torch.is_grad_enabled(), _thread.source, save_modes()
        try:
            return verb(*args, **kwargs)
        except BaseException:
            restore_modes()
            torch.set_grad_enabled(grad)
            _thread.source = source
            raise

    return call


def noise_is_given() -> bool:
    """Whether noise comes from `TensorNoise`. In a compiled graph it does not."""
    return noise_source().take is not None


def generator(device: torch.device) -> torch.Generator | None:
    """The generator of this thread for a device, or None for the global generator.

    Args:
        device: of the tensors to draw.

    Returns:
        The generator, or None.
    """
    seed, generators, _ = noise_source()
    if seed is None:
        return None
    if device not in generators:
        generators[device] = torch.Generator(device).manual_seed(seed)
    return generators[device]


def resolve_seed(seed: int | None) -> int:
    """The seed, or one from the global generator, which `torch.manual_seed` makes repeatable."""
    if seed is None:
        return int(torch.randint(2**62, (), generator=generator(torch.device("cpu"))))
    check_integer("seed", seed, at_least=-(2**63))
    return seed


def _source_argument(device: torch.device) -> dict[str, Any]:
    """The generator as an argument, if there is one: torch takes no dynamic shape with None."""
    source = generator(device)
    return {} if source is None else {"generator": source}


def uniform(shape: _Shape, like: Tensor) -> Tensor:
    """Uniform noise strictly inside (0, 1), in at least single precision.

    Args:
        shape: of the tensor.
        like: a tensor with the dtype and device.

    Returns:
        The numbers.

    >>> import torch
    >>> uniform((2,), torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if is_sharded(like):
        return _spread(uniform, shape, like)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    step = torch.finfo(dtype).eps
    if (take := noise_source().take) is not None:
        below = torch.erf(take(shape).to(dtype) * math.sqrt(0.5)) * 0.5 + 0.5
        return below.clamp(step, 1 - step)
    unit = torch.rand(shape, dtype=dtype, device=like.device, **_source_argument(like.device))
    return unit * (1 - 2 * step) + step


def standard_normal(shape: _Shape, like: Tensor) -> Tensor:
    """Independent standard normal numbers, in the dtype and device of `like`.

    Many float32 numbers on a CPU are looked up in a table, see `functional.fast.normal`.

    Args:
        shape: of the tensor.
        like: a tensor with the dtype and device.

    Returns:
        The numbers.

    >>> import torch
    >>> standard_normal((2, 3), torch.zeros(())).shape
    torch.Size([2, 3])
    """
    source = noise_source()
    if source.take is not None:
        return source.take(shape).to(like.dtype, copy=True)  # the caller may write into it
    if is_sharded(like):
        return _spread(standard_normal, shape, like)
    drawer, count = None if source.seed is None else generator(like.device), math.prod(shape)
    if count >= normal_table.MIN_COUNT and normal_table.can_look_up(like):
        return normal_table.look_up(count, drawer).view(shape)
    if drawer is None:  # torch takes no dynamic shape together with a generator argument
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=drawer)


def _spread(draw: Callable[[_Shape, Tensor], Tensor], shape: _Shape, like: DTensor) -> Tensor:
    """Noise in the parts of `like`: the same wherever processes hold the same numbers."""
    local_shape, number, join = shard_like(shape, like)
    with draw_from(GeneratorNoise(common_seed(like, generator(torch.device("cpu"))) + number)):
        return join(draw(local_shape, like.to_local()))


def normal_like(x: Tensor) -> Tensor:
    """Standard normal noise in the shape, dtype, device and memory layout of x.

    For channels-last tensors `torch.randn_like` fills element by element, nine times slower than
    flat noise viewed in that layout.

    Args:
        x: the tensor to imitate.

    Returns:
        The noise.

    >>> import torch
    >>> x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    >>> normal_like(x).stride() == x.stride()
    True
    """
    # Under vmap the layout of a tensor is not available.
    if x.dim() == 4 and not in_transform() and noise_source().take is None:
        last = x.is_contiguous(memory_format=torch.channels_last)
        if last and not x.is_contiguous():
            n, c, h, w = x.shape
            return standard_normal((n, h, w, c), x).permute(0, 3, 1, 2)
    return standard_normal(x.shape, x)


def random_signs(shape: _Shape, like: Tensor) -> Tensor:
    """Independent +1 and -1, each with probability one half, in the dtype and device of `like`.

    Args:
        shape: of the tensor.
        like: a tensor with the dtype and device.

    Returns:
        The signs.
    """
    if (take := noise_source().take) is not None:
        return torch.where(take(shape) < 0, -1.0, 1.0).to(like.dtype)
    if is_sharded(like):
        return _spread(random_signs, shape, like)
    source = _source_argument(like.device)
    bits = torch.randint(0, 2, shape, device=like.device, dtype=torch.int8, **source)
    return bits.mul_(2).sub_(1).to(like.dtype)


class RandomOpMode(TorchDispatchMode):
    """Passes every random function that torch calls in this thread to `answer`.

    Functions that cannot draw run unchanged.

    Args:
        answer: `answer(function, args, kwargs)` returns the result of the call.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self.count = 0  # of calls without a generator argument

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        draws = torch.Tag.nondeterministic_seeded in function.tags
        names = [a.name for a in schema(function).arguments] if draws else []
        if "dropout_p" in names:  # attention without dropout does not draw, although it has the tag
            place = names.index("dropout_p")
            draws = (args[place] if place < len(args) else named.get("dropout_p", 0.0)) > 0
        if not draws:
            return function(*args, **named)
        self.count += named.get("generator") is None
        return self.answer(function, args, named)


def redirect_random_ops() -> RandomOpMode:
    """A mode in which functions without a generator argument draw from this thread's generator.

    Dropout called as a function, `torch.randn_like`, dropout in attention and recurrent layers.

    >>> import torch
    >>> with draw_from(GeneratorNoise(0)), redirect_random_ops():
    ...     first = torch.nn.functional.dropout(torch.ones(8))
    >>> with draw_from(GeneratorNoise(0)), redirect_random_ops():
    ...     bool((torch.nn.functional.dropout(torch.ones(8)) == first).all())
    True
    """
    return RandomOpMode(call_with_generator)


_WITH_GENERATOR = {  # by the name of the overload without a generator
    "": "generator",
    "low": "low_generator",
    "Tensor": "Tensor_generator",
    "low_dtype": "low_generator_dtype",
}
_fused = threading.RLock()  # an operator may call another one


def call_with_generator(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a random function of torch with the generator of this thread, for `RandomOpMode`.

    Args:
        function: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of the call.
    """
    tensors = (a for a in args if isinstance(a, Tensor))
    device = kwargs.get("device") or next((t.device for t in tensors), torch.device("cpu"))
    source = generator(torch.device(device))
    if source is None or kwargs.get("generator") is not None:
        return function(*args, **kwargs)
    if any(a.name == "generator" for a in schema(function).arguments):
        return function(*args, **{**kwargs, "generator": source})
    name = _WITH_GENERATOR.get(function.name().partition(".")[2], "")
    if name in function.overloadpacket.overloads():
        return getattr(function.overloadpacket, name)(*args, **{**kwargs, "generator": source})
    # A fused kernel draws from the global generator only, so one thread at a time seeds it.
    device, shared = source.device, torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        shared = module.default_generators[index]
    with _fused:
        before = shared.get_state()
        try:
            shared.manual_seed(int(torch.randint(2**62, (), generator=source, device=device)))
            return function(*args, **kwargs)
        finally:
            shared.set_state(before)
