"""Random codes: draws of a Gaussian posterior as numbers of a generator that both sides share.

The weights of a net are dealt to blocks of one size. Of a block, 2^bits candidates are drawn from
the prior by a generator that the reader of a file has too; one of them is taken as a draw of the
posterior, and its number is all that a file needs to hold. A block whose KL is about `bits` loses
nothing by it.

The generator is Philox with ten rounds, in integers, and a table of normal quantiles rounded to
2^-12, whose checksum is known: the same numbers on every machine and with every version of torch.
`torch.randn` promises neither.

A file is: mark and version, a header of integers of variable length, the numbers of the blocks, the
tensors that are not coded, and a BLAKE2 checksum of everything before it. The header has the seed,
the bits of a block, the number of blocks, whether they taper, the deviation of each tensor's prior
and the sizes of every layer; names come from the network that the file is read into.

Havasi, Peharz & Hernandez-Lobato 2019, "Minimal random code learning", alg. 1 and 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.files import write_atomically
from vardrop.compression import zero_pruned_weights
from vardrop.compression.save import layer_sizes, load_tensors, resize_to
from vardrop.functional import normal_kl, to_float32_or_wider, uniform
from vardrop.noisy import NoisyTensor, noisy_modules
from vardrop.posteriors import AdditiveGaussian
from vardrop.priors import Normal

_MARK, _CHECK = b"VDR\x01", 8  # how a file begins, and the bytes of its checksum
_MAX_BITS = 24  # of a block: its candidates are tried one by one
_WORD = 0xFFFFFFFF
_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10
_GRID = 4096  # normal numbers are multiples of 1 / 4096
_DIGEST = "0ec9c9ca9389fccb01f2ec82d5215b4e"  # of the table of quantiles
_EIGHTHS = (
    1.0,
    1.0905077326652577,
    1.189207115002721,
    1.2968395546510096,
    1.4142135623730951,
    1.5422108254079407,
    1.681792830507429,
    1.8340080864093424,
)  # 2^(k / 8)
_TAPER = 6  # eighths of a block's size, by which the first and the last differ from the mean
_CHUNK = 1 << 18  # normal numbers made at a time
_FIXED = -60.0  # log variance of a weight that is coded: none
_MOST = 2.0  # times its budget: as far as a block's KL counts in steering


def philox(first: Tensor, second: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """64 random bits for every counter, as two words of 32 bits in int64.

    Philox2x32-10: in each round, (a, b) -> (high(M a) ^ key ^ b, low(M a)), and the key moves on.

    >>> import torch
    >>> [hex(word) for word in philox(torch.tensor(0), torch.tensor(0), 0)]
    ['0xff1dae59', '0x6cd10df2']

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", sec. 4.3.
    """
    first, second = torch.broadcast_tensors(first, second)
    for _ in range(_ROUNDS):
        product = first * _MULTIPLIER  # modulo 2^64, whatever the sign
        first = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(second).bitwise_xor_(key)
        second = product.bitwise_and_(_WORD)
        key = (key + _WEYL) & _WORD
    return first, second


@cache
def _quantiles() -> Tensor:
    """Standard normal quantiles at the middles of 2^16 equal steps, as multiples of 1 / 4096."""
    middles = (torch.arange(1 << 15, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    lower = (torch.special.ndtri(middles) * _GRID).round().to(torch.int16)
    found = torch.cat([lower, -lower.flip(0)])
    text = ",".join(map(str, found.tolist()))
    if (digest := hashlib.blake2b(text.encode(), digest_size=16).hexdigest()) != _DIGEST:
        raise VardropError(
            f"Expected the table of normal quantiles to have the checksum {_DIGEST}, but got "
            f"{digest}: this build of torch rounds otherwise. Code and decode on another machine."
        )
    return found.float() / _GRID


def _halves(first: Tensor, second: Tensor) -> Tensor:
    """The four numbers of 16 bits in two words, along a new last axis."""
    low = 0xFFFF
    return torch.stack([first >> 16, first & low, second >> 16, second & low], -1)


@dataclass(frozen=True)
class Layout:
    """Which weight belongs to which block, at which place: the same wherever it is made.

    Args:
        weights: how many there are in all.
        blocks: to how many blocks they are dealt.
        seed: of the generator.
        tapered: whether later blocks have fewer weights than earlier ones.
    """

    weights: int
    blocks: int
    seed: int
    tapered: bool = False

    @cached_property
    def order(self) -> Tensor:
        """The weights as they are dealt: sorted by random keys."""
        number = torch.arange(self.weights, device="cpu")
        high, low = philox(number, torch.tensor(_WORD, device="cpu"), self.seed)
        return ((high << 31) | (low >> 1)).argsort(stable=True)

    @cached_property
    def starts(self) -> Tensor:
        """Where in the order each block begins, and where the last one ends.

        If they are tapered, the first have 7/4 and the last 1/4 of as many weights as there are on
        the average; where there are fewer than eight per block, all have the same number.
        """
        n, b = self.weights, self.blocks
        t = _TAPER if self.tapered and n >= 8 * b else 0
        each = [k * n * ((8 + t) * b - t * k) // (8 * b * b) for k in range(b + 1)]
        return torch.tensor(each, device="cpu")

    @cached_property
    def dealt(self) -> Tensor:
        """The block of every weight, as they are dealt."""
        return torch.arange(self.blocks, device="cpu").repeat_interleave(self.starts.diff())

    @cached_property
    def block(self) -> Tensor:
        """The block of every weight."""
        return torch.empty_like(self.dealt).index_copy_(0, self.order, self.dealt)

    @property
    def _fours(self) -> int:
        """Words that a block takes from the generator: four normal numbers each."""
        return -(-int(self.starts.diff().max()) // 4)

    def members(self, block: int) -> Tensor:
        """The weights of a block, in the order of its candidates' numbers."""
        return self.order[self.starts[block] : self.starts[block + 1]]

    def candidates(self, block: int, first: int, last: int) -> Tensor:
        """Standard normal numbers (last - first, size of the block): a row per candidate."""
        size = int(self.starts[block + 1] - self.starts[block])
        words = block * self._fours + torch.arange(-(-size // 4), device="cpu")
        number = torch.arange(first, last, device="cpu").unsqueeze(1)
        halves = _halves(*philox(number, words, self.seed)).flatten(1)[:, :size]
        return _quantiles().index_select(0, halves.flatten()).view(-1, size)

    def chosen(self, index: Tensor) -> Tensor:
        """The number of every weight, given which candidate each block has taken."""
        within = torch.arange(self.weights, device="cpu") - self.starts[self.dealt]
        words = philox(index[self.dealt], self.dealt * self._fours + within // 4, self.seed)
        halves = _halves(*words).gather(1, (within % 4).unsqueeze(1)).squeeze(1)
        return torch.empty(self.weights).index_copy_(0, self.order, _quantiles()[halves])


def deviation(level: int) -> float:
    """2^(level / 8), the same on every machine."""
    return math.ldexp(_EIGHTHS[level % 8], level // 8)


def nearest_level(std: float) -> int:
    """The level whose deviation is nearest to a number, as a signed byte."""
    level = round(8 * math.log2(std)) if 0 < std < math.inf else 128
    if not -128 <= level <= 127:
        raise VardropError(
            f"Expected the deviation of a prior to lie between 2^-16 and 2^15.9, but got {std:g}. "
            "Train with another one, or scale the weights."
        )
    return level


def coded_tensors(net: nn.Module) -> dict[str, NoisyTensor]:
    """The tensors of a net that a random code is of, by name; an error names what it cannot take.

    All noise has to be N(mean, sigma^2) per weight, against N(0, std^2). They come in the order of
    the net's `state_dict`.
    """
    found: dict[str, NoisyTensor] = {}
    for name, module in noisy_modules(net).items():
        tensors = module.noisy_tensors()
        if not tensors or getattr(module, "gate", None) is not None:
            raise VardropError(
                f"Expected noise on weights alone for a random code, but got '{name}' ({module}). "
                "Use a recipe such as vardrop.bayes_by_backprop(vardrop.Normal(learned=True))."
            )
        for own, tensor in tensors.items():
            key = f"{name}.{own}".lstrip(".")
            _check_gaussian(key, tensor)
            found[key] = tensor
    means = {id(tensor.mean) for tensor in found.values()}
    keys = [key for key, p in net.named_parameters(remove_duplicate=False) if id(p) in means]
    if len(keys) > len(means):
        raise VardropError(
            f"Expected every noisy tensor to belong to one layer for a random code, but some of "
            f"{', '.join(keys)} are shared. Give each layer its own."
        )
    return {key: found[key] for key in keys}


def _check_finite(tensors: Mapping[str, NoisyTensor]) -> None:
    for key, tensor in tensors.items():
        for value in (tensor.mean, *tensor.noise.values()):
            if not bool(value.isfinite().all()):
                raise VardropError(
                    f"Expected '{key}' to have finite means and variances, but got NaN or infinity."
                )


def _check_gaussian(key: str, tensor: NoisyTensor) -> None:
    prior, posterior = tensor.prior, tensor.posterior
    if type(posterior) is not AdditiveGaussian:
        raise VardropError(
            f"Expected '{key}' to have the posterior AdditiveGaussian for a random code, but got "
            f"{posterior!r}. Use a recipe such as vardrop.bayes_by_backprop()."
        )
    if type(prior) is not Normal or prior.mean != 0:
        raise VardropError(
            f"Expected '{key}' to have a Normal prior of mean 0 for a random code, but got "
            f"{prior!r}. Use vardrop.bayes_by_backprop(vardrop.Normal(learned=True))."
        )
    if not isinstance(tensor.mean, nn.Parameter):
        raise VardropError(
            f"Expected '{key}' to be a parameter for a random code, but it is computed. "
            "Remove its parametrization."
        )


class RandomCode(nn.Module):
    """Codes the weights of a net as draws of its posterior, a block of them at a time.

    The KL of each block is steered to `block_bits` bits by a weight beta of its own:

        loss = NLL + sum_b beta_b KL_b / N,    beta_b <- beta_b (KL_b / (block_bits ln 2))^gain

    A block is coded by the number of one of 2^block_bits draws w_k of the prior, taken with
    probability proportional to q(w_k) / p(w_k). Its weights stay fixed from then on, and training
    the others makes up for what the draw has changed. The state is in buffers, so that
    `state_dict` holds where a training stands.

    Args:
        net: a net whose noise is N(mean, sigma^2) per weight against N(0, std^2), one std per
            tensor, such as by `bayes_by_backprop(Normal(learned=True))`.
        bits: the length of the code in all, without the header of a file.
        block_bits: of a block. More of them make better use of the bits; each one doubles the time.
        seed: of the shared generator, below 2^32.
        tapered: give later blocks fewer weights, so more bits for each: other weights can still
            make up for an early draw, and none can for the last.
        beta: the weight of every block's KL to start with.

    Returns (when called):
        sum_b beta_b KL_b over blocks that are not yet coded, in nats: divide it by the number of
        examples and add it to the NLL.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(20, 2), vd.bayes_by_backprop(log_sigma2=-2.0))
    >>> code = RandomCode(net, bits=32, block_bits=8)
    >>> optimizer = torch.optim.Adam(net.parameters())
    >>> while code.open:  # draw the net's weights, block by block
    ...     (net(torch.ones(4, 20)).square().mean() + code() / 100).backward()
    ...     optimizer.step()
    ...     code.steer()  # after every step
    ...     code.close(blocks=1)
    >>> code.index.shape, bool((code.index < 2**8).all())
    (torch.Size([4]), True)
    """

    index: Tensor
    beta: Tensor
    level: Tensor
    latest: Tensor
    block: Tensor

    def __init__(
        self,
        net: nn.Module,
        bits: int,
        block_bits: int = 16,
        seed: int = 0,
        tapered: bool = True,
        beta: float = 0.01,
    ) -> None:
        super().__init__()
        tensors = coded_tensors(net)
        weights = sum(t.mean.numel() for t in tensors.values())
        self.layout = checked_layout(weights, bits, block_bits, seed, tapered)
        self._net, self.block_bits = (net,), block_bits  # in a tuple, so that it is no part of this
        device = next(iter(tensors.values())).mean.device
        blocks = self.layout.blocks
        self.register_buffer("index", torch.full((blocks,), -1, device=device))
        self.register_buffer("beta", torch.full((blocks,), float(beta), device=device))
        self.register_buffer("level", torch.zeros(len(tensors), dtype=torch.long, device=device))
        self.register_buffer("block", self.layout.block.to(device), persistent=False)
        budget = block_bits * math.log(2)
        self.register_buffer("latest", torch.full((blocks,), budget, device=device))
        self._values: list[Tensor] | None = None
        self.register_load_state_dict_post_hook(_forget)

    @property
    def open(self) -> int:
        """How many blocks are not coded yet."""
        return int((self.index < 0).sum())

    @property
    def net(self) -> nn.Module:
        """The net that is coded."""
        return self._net[0]

    def levels(self) -> dict[str, int]:
        """The deviation of every tensor's prior, 2^(level / 8), by the name of the tensor."""
        return dict(zip(coded_tensors(self.net), self.level.tolist(), strict=True))

    def values(self) -> dict[str, Tensor]:
        """The tensors that the code stands for, by name."""
        return dict(zip(coded_tensors(self.net), self._decoded(), strict=True))

    def scales(self) -> list[Tensor]:
        """The deviation of the prior of every tensor: the net's own before the first block."""
        tensors = coded_tensors(self.net).values()
        if self.open == self.layout.blocks:
            priors = [(t, t.prior) for t in tensors]
            return [
                p.scale(to_float32_or_wider(t.mean), t.hyper)
                for t, p in priors
                if isinstance(p, Normal)
            ]
        levels = self.level.tolist()
        return [
            to_float32_or_wider(t.mean).new_tensor(deviation(n))
            for t, n in zip(tensors, levels, strict=True)
        ]

    def block_kl(self) -> Tensor:
        """The KL of every block, in nats, with its gradient."""
        for module in noisy_modules(self.net).values():
            module.passes_without_kl = 0
        tensors, zero = coded_tensors(self.net).values(), self.beta.new_zeros(())
        terms = [
            normal_kl(
                to_float32_or_wider(t.mean),
                zero,
                std,
                log_variance=to_float32_or_wider(t.noise["log_sigma2"]),
            ).flatten()
            for t, std in zip(tensors, self.scales(), strict=True)
        ]
        return torch.zeros_like(self.beta).index_add(0, self.block, torch.cat(terms))

    def forward(self) -> Tensor:
        found = self.block_kl()
        self.latest.copy_(found.detach())
        return (self.beta * found).sum()

    @torch.no_grad()
    def steer(self, gain: float = 0.003) -> None:
        """After a step of the optimizer: move every beta, and put coded weights back in place.

        Args:
            gain: the power of KL / budget by which a beta moves; 0 leaves them.
        """
        ratio = self.latest / (self.block_bits * math.log(2))
        self.beta.mul_(ratio.clamp(1 / _MOST, _MOST).pow(gain))
        if self.open < self.layout.blocks:
            self._hold()

    @torch.no_grad()
    def close(self, blocks: int | None = None, nearest: bool = False) -> None:
        """Code the next blocks: their weights are fixed from now on.

        Args:
            blocks: how many; all that are open where None.
            nearest: take the candidate of the highest density under q, which is nearest to the
                mean in units of sigma, and no draw of q: a better net for the same bits, whose
                weights no longer tell how sure they are.
        """
        _check_finite(coded_tensors(self.net))
        if self.open == self.layout.blocks:
            levels = [nearest_level(float(scale)) for scale in self.scales()]
            self.level.copy_(torch.tensor(levels))
        todo, flat = (self.index < 0).nonzero().flatten().tolist()[:blocks], self._flat()
        for block in todo:
            self.index[block] = self._taken(block, *flat, nearest)
            self.beta[block] = 0.0
        self._values = None
        self._hold()

    def _flat(self) -> tuple[Tensor, Tensor]:
        """mean / std and std / sigma of every weight, std being the prior's."""
        tensors = coded_tensors(self.net).values()
        means, ratios = [], []
        for tensor, level in zip(tensors, self.level.tolist(), strict=True):
            std = deviation(level)
            means.append((tensor.mean.double() / std).flatten().cpu())
            noise = tensor.noise["log_sigma2"].double()
            ratios.append((std * torch.exp(-0.5 * noise)).flatten().cpu())
        return torch.cat(means).float(), torch.cat(ratios).float()

    def _taken(self, block: int, mean: Tensor, ratio: Tensor, nearest: bool) -> int:
        """One of the candidates of a block: a draw, with probability proportional to q / p."""
        members, count = self.layout.members(block), 1 << self.block_bits
        m, r = mean[members], ratio[members]
        step = max(_CHUNK // max(len(members), 1), 1)
        best, taken = -math.inf, 0
        for first in range(0, count, step):
            z = self.layout.candidates(block, first, min(first + step, count))
            score = -0.5 * ((z - m) * r).square().sum(1).double()  # log q, but for a constant
            if not nearest:
                score += 0.5 * z.square().sum(1)
                score -= torch.log(-torch.log(uniform(score.shape, score)))  # the largest is a draw
            value, place = score.max(0)
            if float(value) > best:
                best, taken = float(value), first + int(place)
        return taken

    def _hold(self) -> None:
        """Put the weights that are coded where their code says."""
        tensors = coded_tensors(self.net)
        closed = (self.index >= 0)[self.block].split([t.mean.numel() for t in tensors.values()])
        for tensor, value, fixed in zip(tensors.values(), self._decoded(), closed, strict=True):
            mean, mask = tensor.mean, fixed.view(tensor.mean.shape)
            mean.copy_(torch.where(mask, value.to(mean), mean))
            tensor.noise["log_sigma2"].masked_fill_(mask, _FIXED)

    def _decoded(self) -> list[Tensor]:
        if self._values is None:
            shapes = [t.mean.shape for t in coded_tensors(self.net).values()]
            self._values = decoded(self.layout, self.index.cpu(), self.level.tolist(), shapes)
        return self._values


def _forget(code: Any, keys: Any) -> None:
    code._values = None


def checked_layout(weights: int, bits: int, block_bits: int, seed: int, tapered: bool) -> Layout:
    """The layout of a code, or an error that names what it cannot be made of."""
    if not 1 <= block_bits <= _MAX_BITS or not 0 <= seed <= _WORD:
        raise VardropError(
            f"Expected `block_bits` in 1..{_MAX_BITS} and `seed` in 0..2^32 - 1, but got "
            f"{block_bits} and {seed}."
        )
    blocks = -(-bits // block_bits)
    if blocks > weights:
        raise VardropError(
            f"Expected at most one block per weight, but got {blocks} blocks of {block_bits} bits "
            f"for {weights} weights. Give fewer `bits`, or more `block_bits`."
        )
    return Layout(weights, blocks, seed, tapered)


def decoded(
    layout: Layout, index: Tensor, levels: list[int], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The tensors of a code: standard normal numbers times each tensor's deviation.

    Args:
        layout: of the code.
        index: (blocks,), the candidate that each block has taken; any number where it is open.
        levels: of the deviations, one per tensor.
        shapes: of the tensors, in their order.
    """
    flat = layout.chosen(index.clamp(min=0)).double()
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [
        (part * deviation(level)).float().view(tuple(shape))
        for part, level, shape in zip(parts, levels, shapes, strict=True)
    ]


def index_bytes(index: Tensor, bits: int) -> bytes:
    """Numbers of so many bits each, one after the other, the highest bit first.

    >>> import torch
    >>> index_bytes(torch.tensor([1, 2, 3]), 4).hex()
    '1230'
    """
    places = torch.arange(bits - 1, -1, -1, device="cpu")
    each = ((index.cpu().unsqueeze(1) >> places) & 1).flatten()
    each = torch.cat([each, each.new_zeros(-len(each) % 8)]).view(-1, 8)
    return bytes((each << torch.arange(7, -1, -1, device="cpu")).sum(1).tolist())


def index_from_bytes(raw: bytes, count: int, bits: int) -> Tensor:
    """The numbers that `index_bytes` wrote.

    >>> index_from_bytes(bytes.fromhex("1230"), 3, 4)
    tensor([1, 2, 3])
    """
    each = torch.tensor(list(raw), dtype=torch.long, device="cpu").unsqueeze(1)
    each = ((each >> torch.arange(7, -1, -1, device="cpu")) & 1).flatten()[: count * bits]
    return (each.view(count, bits) << torch.arange(bits - 1, -1, -1, device="cpu")).sum(1)


def write_code(code: RandomCode, path: Path) -> int:
    """Write the net of a code, all blocks of which are closed; the bytes on disk.

    Tensors that are not coded, such as those of BatchNorm, are kept unchanged.
    """
    if code.open:
        raise VardropError(
            f"Expected all blocks to be closed, but {code.open} are open. Call code.close()."
        )
    layout, levels, plain = code.layout, code.levels(), zero_pruned_weights(code.net)[0]
    plan = layer_sizes(plain)
    if changed := [key for key, found in plan.items() if key not in ("sizes", "unfused") and found]:
        raise VardropError(f"Expected a net that differs in sizes alone, but got {changed}.")
    tensors = {name: t.detach().cpu() for name, t in plain.state_dict().items()}
    held = [0 if name not in levels else 1 + _zigzag(levels[name]) for name in tensors]
    sizes = [size for layer in plan["sizes"].values() for size in layer]
    header = [layout.seed, code.block_bits, layout.blocks, int(layout.tapered), *held, *sizes]
    kept = b"".join(
        t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
        if name not in levels
    )
    body = _MARK + b"".join(map(_varint, header)) + index_bytes(code.index, code.block_bits) + kept
    raw = body + hashlib.blake2b(body, digest_size=_CHECK).digest()
    write_atomically(path, raw)
    return len(raw)


def read_code(path: Path, into: nn.Module) -> nn.Module:
    """A copy of `into`, a net of full size, with the sizes and weights of the file."""
    raw = path.read_bytes()
    body, check = raw[:-_CHECK], raw[-_CHECK:]
    if body[:4] != _MARK or hashlib.blake2b(body, digest_size=_CHECK).digest() != check:
        raise VardropError(f"Expected {path} to be a random code, but its mark or checksum differ.")
    plan, at = layer_sizes(into), len(_MARK)
    layers, tensors = plan["sizes"], into.state_dict()
    count = sum(len(sizes) for sizes in layers.values())
    header, at = _varints(body, at, 4 + len(tensors) + count)
    (seed, block_bits, blocks, tapered), sizes = header[:4], iter(header[4 + len(tensors) :])
    held = dict(zip(tensors, header[4:], strict=False))
    levels = {name: _unzigzag(level - 1) for name, level in held.items() if level}
    plan["sizes"] = {name: [next(sizes) for _ in old] for name, old in layers.items()}
    net = resize_to(into, plan)
    empty = net.state_dict()
    shapes = [empty[name].shape for name in levels]
    weights = sum(math.prod(shape) for shape in shapes)
    layout = checked_layout(weights, blocks * block_bits, block_bits, seed, bool(tapered))
    end = at + -(-blocks * block_bits // 8)
    index = index_from_bytes(body[at:end], blocks, block_bits)
    values = decoded(layout, index, list(levels.values()), shapes)
    found = {n: v.to(empty[n].dtype) for n, v in zip(levels, values, strict=True)}
    for name, like in empty.items():
        if name not in levels:
            start, end = end, end + like.numel() * like.element_size()
            flat = torch.frombuffer(bytearray(body[start:end]), dtype=like.dtype)
            found[name] = flat.view(like.shape)
    load_tensors(net, found)
    return net


def _zigzag(number: int) -> int:
    """A number of either sign as a small one of none: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return 2 * number if number >= 0 else -2 * number - 1


def _unzigzag(number: int) -> int:
    return -(number + 1) // 2 if number % 2 else number // 2


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _varints(raw: bytes, at: int, count: int) -> tuple[list[int], int]:
    """So many numbers that `_varint` wrote, and where the next byte is."""
    found = []
    for _ in range(count):
        number = shift = 0
        while raw[at] > 127:
            number |= (raw[at] & 127) << shift
            at, shift = at + 1, shift + 7
        found.append(number | raw[at] << shift)
        at += 1
    return found, at
