"""The evidence lower bound as a module, so that DDP, compile and checkpoints treat it as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.calls import call_net, check_named, clone_batch, output_tensor, plain_batch
from vardrop._core.checks import (
    check_integer,
    check_net,
    check_number,
    check_tensor,
    describe_value,
)
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import disable_compiler, in_transform, tree_map_only
from vardrop.functional import share_in_step
from vardrop.heads import Head, HeadParts
from vardrop.likelihoods import Bernoulli, Categorical, Likelihood
from vardrop.noisy import Noisy, has_noise, sum_kl


class ELBOParts(NamedTuple):
    """loss = nll + beta kl / num_data, per data point; `kl` is the full sum over the net.

    Of a net with a head, `head` holds the parts of the head's own objective, and its `kl`, `aux`
    and `-entropy` (means over examples, so not divided by `num_data`) are in `loss` too.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    beta: Tensor
    head: HeadParts | None = None


class ELBO(nn.Module):
    """The negative ELBO per data point and its parts.

        loss = mean_batch -log p(y | x, w) + beta KL(q || p) / num_data,  w ~ q

    A net that ends in a `Head` (see `dropmax`) is trained by the head's own objective in the place
    of the NLL; its likelihood is `Categorical()`.

    Call it as `elbo(x, y)`: x is what the net takes, a tensor, a tuple of arguments or a dictionary
    of named ones.

    Wrap *this* module in DistributedDataParallel or `torch.compile`: parameters that only the KL
    sees are then synchronised too, and `beta`, a buffer, changes without a recompilation.

    Args:
        net: a net with noisy modules.
        likelihood: a module such as `Categorical()`, or any callable that returns the mean NLL of
            an example: summed over its targets, averaged over examples.
        num_data: how many training examples there are in all (not in a batch): of sequences, how
            many sequences, whatever the number of their tokens.
        beta: the weight of the KL; change it with `set_beta`. A net without noise needs beta=0.
        samples: draws per step; their NLLs are averaged and the gradient is exact.
        kl_value_every: compute the value of the KL only every so many training steps and repeat
            it in between; the gradient is exact at every step. Saves time on large dense nets.
        output: picks the tensor from what the net returns; its `logits`, where it has some.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> elbo = vd.ELBO(net, vd.Categorical(), num_data=100)
    >>> out = elbo(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    >>> out.loss.backward()
    >>> bool(torch.isclose(out.loss, out.nll + out.kl / 100))
    True

    Kingma, Salimans & Welling 2015, eq. 1 and 4.
    """

    beta: Tensor
    _latest_kl: Tensor

    def __init__(
        self,
        net: nn.Module,
        likelihood: Callable[[Any, Any], Tensor],
        num_data: int,
        beta: float = 1.0,
        samples: int = 1,
        kl_value_every: int = 1,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_net(net)
        scale = "It is the size of the training set, which scales the KL."
        check_integer("num_data", num_data, remedy=scale)
        if isinstance(likelihood, type) or not callable(likelihood):
            raise VardropError(
                "Expected `likelihood` to be callable as (output, target), but got "
                f"{describe_value(likelihood)}. Make one: vardrop.Categorical()."
            )
        check_integer("samples", samples)
        check_integer("kl_value_every", kl_value_every)
        check_number("beta", beta, at_least=0)
        if beta != 0 and not has_noise(net):
            raise VardropError(
                "Expected `net` to have noisy modules, but got a plain one. Call "
                "vardrop.convert(net, recipe) first, or pass beta=0 for the likelihood alone."
            )
        self._check_head(net, likelihood)
        self.net, self.likelihood, self.output = net, likelihood, output
        self.num_data, self.samples = num_data, samples
        self._loss_is_checked = isinstance(likelihood, Likelihood)
        self.kl_value_every, self._step = kl_value_every, 0
        self.register_buffer("beta", torch.tensor(0.0))
        self.set_beta(beta)

    def set_beta(self, beta: float) -> None:
        """Change the weight of the KL in place."""
        check_number("beta", beta, at_least=0)
        self.beta.fill_(beta)

    def _check_head(self, net: nn.Module, likelihood: Any) -> None:
        heads = [m for m in net.modules() if isinstance(m, Head)]
        if len(heads) > 1:
            raise VardropError(f"Expected at most one head in `net`, but got {len(heads)}.")
        if heads and type(likelihood) is not Categorical:
            raise VardropError(
                "Expected `likelihood` to be Categorical() for a net with a head, but got "
                f"{likelihood!r}."
            )

    def forward(self, x: Any, y: Any, weight: Tensor | None = None) -> ELBOParts:
        """The loss and its parts on one batch.

        Args:
            x: inputs of the net.
            y: targets of the likelihood.
            weight: (N,), for how many examples each one stands; a weight of 2 is an example that
                is there twice. `num_data` counts each once all the same.
        """
        every_step = weight is not None or self.kl_value_every == 1 or not self.training
        if torch.compiler.is_compiling():  # a compiler finds by itself what is shared
            return self.parts(x, y, None, weight) if every_step else _apart(self, x, y)
        with share_in_step():
            if every_step:
                return self.parts(x, y, None, weight)
            return self.counted(self.parts, x, y)

    def outputs(self, x: Any) -> Any:
        """What the net returns for a batch, picked by `output` where that is given."""
        found = call_net(self.net, clone_batch(plain_batch(x)))
        return found if self.output is None else self.output(found)

    def counted(self, parts: Callable[..., ELBOParts], x: Any, y: Any) -> ELBOParts:
        """`parts(x, y, latest)`: where `latest` is None the KL is computed, else it is taken so."""
        if self.kl_value_every == 1 or not self.training:
            return parts(x, y, None)
        due = self._step % self.kl_value_every == 0
        self._step += 1
        found = parts(x, y, None if due else self._latest_kl)
        if due:
            self._latest_kl = found.kl.detach().clone()  # a graph may write over its outputs
        return found

    def parts(
        self, x: Any, y: Any, latest: Tensor | None = None, weight: Tensor | None = None
    ) -> ELBOParts:
        """The loss and its parts; with `latest` in the place of the value of the KL."""
        noisy = [m for m in self.net.modules() if isinstance(m, Noisy)]
        head = next((m for m in noisy if isinstance(m, Head)), None)
        terms = [self._data_term(x, y, weight, head) for _ in range(self.samples)]
        loss, nll, parts = terms[0] if self.samples == 1 else _average(terms)
        divergence = sum_kl(noisy, value=latest is None)
        if divergence is None:
            divergence = torch.zeros((), device=nll.device)
        if latest is not None:
            divergence = divergence - divergence.detach() + latest
        loss = loss + self.beta * divergence / self.num_data
        return ELBOParts(loss, nll, divergence, self.beta, parts)

    def _data_term(
        self, x: Any, y: Any, weight: Tensor | None, head: Head | None
    ) -> tuple[Tensor, Tensor, HeadParts | None]:
        """The loss without the KL, the NLL and the parts of a head, for one draw."""
        traced = torch.compiler.is_compiling() or in_transform()
        if isinstance(x, Mapping):
            x = dict(x)  # a `BatchEncoding`, say
            if not traced:  # a check of values would break the graph
                check_named(x)
        if head is not None:
            parts = self._head_parts(x, y, weight, head)
            return parts.loss, parts.nll, parts
        output = call_net(self.net, clone_batch(x))
        if self.output is not None:
            output = self.output(output)
        elif isinstance(self.likelihood, Likelihood) and not isinstance(output, Tensor):
            output = output_tensor(output)  # another loss gets all that the net returns
        if not traced:
            check_batch(self.likelihood, output, y)
            if not self._loss_is_checked:
                self._check_first_batch(output, y)
        nll = self.likelihood(output, y) if weight is None else self._weighed(output, y, weight)
        return nll, nll, None

    def _head_parts(self, x: Any, y: Any, weight: Tensor | None, head: Head) -> HeadParts:
        if weight is not None:
            raise VardropError(
                f"Expected no `weight` for a model with a head, which has its own loss, but got "
                f"{describe_value(weight)}. Repeat the examples instead."
            )
        if y.dim() > 1 and getattr(self.likelihood, "class_axis", None) != -1:
            raise VardropError(
                f"Expected `likelihood` to be Categorical(class_axis=-1) for a head over positions "
                f"(targets of shape {tuple(y.shape)}), whose classes are last, but got "
                f"{self.likelihood!r}."
            )
        return head.loss_in(self.net, clone_batch(x), y)

    @torch.no_grad()
    def _check_first_batch(self, output: Any, y: Any) -> None:
        """Raise if a loss of the user's is no mean over examples, which `num_data` relies on."""
        self._loss_is_checked = True
        twice = tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (output, y))
        once, doubled = float(self.likelihood(output, y)), float(self.likelihood(*twice))
        if math.isfinite(once) and not math.isclose(once, doubled, rel_tol=1e-3, abs_tol=1e-6):
            raise VardropError(
                f"Expected `likelihood` to be a mean over examples, but got {once:g} for a batch "
                f"and {doubled:g} for the same examples twice. The KL would have a wrong weight. "
                "Use reduction='mean', or divide by the number of examples."
            )

    def _weighed(self, output: Tensor, y: Any, weight: Tensor) -> Tensor:
        """The mean over examples of weight times NLL."""
        if not isinstance(self.likelihood, Likelihood):
            raise VardropError(
                f"Expected `likelihood` to be one of vardrop's for a `weight`, but got "
                f"{describe_value(self.likelihood)}. Weigh the examples inside of it."
            )
        each = self.likelihood.example_nll(output, y)
        check_tensor("weight", weight)
        if weight.shape != each.shape:
            raise VardropError(
                f"Expected `weight` to have one number for each of {len(each)} examples, but got "
                f"shape {tuple(weight.shape)}."
            )
        return (weight * each).mean()


def _counted(elbo: ELBO, x: Any, y: Any) -> ELBOParts:
    return elbo.counted(elbo.parts, x, y)


_apart = disable_compiler(
    _counted,
    "`kl_value_every` counts steps, so it takes two graphs: one with the value of the KL and one "
    "without. Use kl_value_every=1 with fullgraph=True, or vardrop.compile.",
)


def _average(
    terms: list[tuple[Tensor, Tensor, HeadParts | None]],
) -> tuple[Tensor, Tensor, HeadParts | None]:
    losses, nlls, parts = zip(*terms, strict=True)
    heads = [p for p in parts if p is not None]
    head = HeadParts(*map(_mean, zip(*heads, strict=True))) if heads else None
    return _mean(losses), _mean(nlls), head


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


def check_batch(likelihood: Any, output: Any, y: Any) -> None:
    """Refuse targets that the library's own likelihoods would take for something else."""
    if not isinstance(likelihood, Bernoulli | Categorical):
        return
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        check_tensor("net(x)", output, "Wrap the net in a module that returns one tensor.")
        check_tensor("y", y)
    if output.dim() > 0 and len(output) == 0:
        raise VardropError(
            f"Expected a batch of at least one example, but got an output of shape "
            f"{tuple(output.shape)}. Leave out empty batches: their mean is not defined."
        )
    if isinstance(likelihood, Categorical):
        _check_classes(likelihood, output, y)
    else:
        _check_binary(output, y)


def _check_classes(likelihood: Categorical, output: Tensor, y: Tensor) -> None:
    if y.is_floating_point() and y.shape == output.shape:
        return  # probabilities of the classes
    axis = likelihood.class_axis if output.dim() > 1 else 0
    expected = output.select(axis, 0).shape
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != expected:
        raise VardropError(
            f"Expected `y` to hold class indices of shape {tuple(expected)}, but got {y.dtype} of "
            f"shape {tuple(y.shape)}. Convert it with y.long(), reshape it, or say where the "
            "classes of the output are: Categorical(class_axis=-1)."
        )
    low, high = _range(y)
    if low <= likelihood.ignore_index <= high:
        some = y[likelihood.valid_mask(y)]
        if y.dim() > 1 or not some.numel():
            likelihood.check_valid(y)
        low, high = _range(some)
    classes = output.shape[axis]
    if low < 0 or high >= classes:
        raise VardropError(
            f"Expected `y` to lie in 0..{classes - 1}, but got {low:g}..{high:g}. "
            "Count classes from 0, and let the net have an output for each."
        )


def _check_binary(output: Tensor, y: Tensor) -> None:
    if y.shape != output.shape:
        raise VardropError(
            f"Expected `y` to have the shape {tuple(output.shape)} of the output, but got "
            f"{tuple(y.shape)}. Reshape the target."
        )
    low, high = _range(y)
    if not (low >= 0 and high <= 1):
        raise VardropError(
            f"Expected `y` to lie between 0 and 1, but got {low:g}..{high:g}. "
            "It is the probability of a one; use Gaussian() for other numbers."
        )


def _range(y: Tensor) -> tuple[float, float]:
    """The least and the largest value, where looking at them is possible and costs nothing."""
    if type(y) is not Tensor or in_transform() or not y.is_cpu or y.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(y)
    return low.item(), high.item()
