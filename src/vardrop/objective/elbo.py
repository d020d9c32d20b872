"""The evidence lower bound as a module, for use with DDP, `torch.compile` and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.calls import call_net, check_named, clone_batch, output_tensor
from vardrop._core.checks import (
    LARGEST_WEIGHT,
    check_integer,
    check_net,
    check_number,
    check_tensor,
    describe_value,
)
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.torch_private import disable_compiler, in_transform, tree_map_only
from vardrop.functional import share_in_step
from vardrop.heads import Head, HeadParts
from vardrop.likelihoods import Bernoulli, Categorical, Likelihood
from vardrop.noisy import Noisy, has_noise, sum_kl


class ELBOParts(NamedTuple):
    """loss = nll + beta kl / num_data, per data point.

    `kl`, `aux` and `-entropy` of a head are means over examples, so they enter `loss` without the
    division by `num_data`.

    Args:
        loss: the objective.
        nll: the negative log-likelihood, per data point.
        kl: the sum over the model.
        beta: the weight of the KL.
        head: the parts of the objective of a head, or None without a head.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    beta: Tensor
    head: HeadParts | None = None


class ELBO(nn.Module):
    """The negative ELBO per data point and its parts.

        loss = mean_batch -log p(y | x, w) + beta KL(q || p) / num_data,  w ~ q

    The loss of a model that ends in a `Head` (see `dropmax`) is the head's objective instead of the
    NLL. Its likelihood is `Categorical()`.

    Call it as `elbo(x, y)`. The input x is a tensor, a tuple of arguments or a dictionary of named
    arguments of the model.

    Wrap *this* module in DistributedDataParallel or `torch.compile`. Parameters that only the KL
    uses are then synchronised too, and `beta`, a buffer, changes without a recompilation.

    Noise comes from torch's global generator. In a DDP loop all ranks would draw the same noise if
    they had the same seed, so give each rank its own seed once the model is built. DDP copies the
    parameters of rank 0 to all ranks.

        ddp = DistributedDataParallel(elbo)
        torch.manual_seed(seed + torch.distributed.get_rank())

    `LightningELBO`, `ELBOTrainer` and the runs of vardrop do this themselves.

    Args:
        net: a model with noisy modules.
        likelihood: a module such as `Categorical()`, or any callable that returns the mean NLL of
            an example: summed over its targets, averaged over examples.
        num_data: the size of the training set, not of a batch. For sequences it is the number of
            sequences, not of tokens.
        beta: the weight of the KL. Change it with `set_beta`. A model without noise needs beta=0.
        samples: draws per step. Their NLLs are averaged.
        kl_value_every: compute the value of the KL only every so many training steps and repeat
            it in between. The gradient is exact at every step. Saves time on large dense models.
        output: selects the tensor from the output of the model. By default the output itself, or
            its `logits`.
        batched: False if the inputs are not split into examples, such as a graph. Named inputs may
            then have different lengths.

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
        batched: bool = True,
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
        heads = sum(isinstance(m, Head) for m in net.modules())
        if heads > 1:
            raise VardropError(f"Expected at most one head in `net`, but got {heads}.")
        if heads and type(likelihood) is not Categorical:
            raise VardropError(
                "Expected `likelihood` to be Categorical() for a net with a head, but got "
                f"{likelihood!r}."
            )
        self.net, self.likelihood, self.output = net, likelihood, output
        self.num_data, self.samples, self.batched = num_data, samples, batched
        self._loss_is_checked, self._has_kl = isinstance(likelihood, Likelihood), has_noise(net)
        self.kl_value_every, self._step = kl_value_every, 0
        self.register_buffer("beta", torch.tensor(float(beta)))

    def set_beta(self, beta: float) -> None:
        """Change the weight of the KL in place.

        Args:
            beta: the new weight.
        """
        check_number("beta", beta, at_least=0)
        self.beta.fill_(beta)

    def forward(self, x: Any, y: Any, weight: Tensor | None = None) -> ELBOParts:
        """The loss and its parts on one batch.

        Args:
            x: inputs of the model.
            y: targets of the likelihood.
            weight: (N,), the weight of each example. A weight of 2 is an example that occurs twice.
                `num_data` counts it once.
        """
        every_step = weight is not None or self.kl_value_every == 1 or not self.training
        if torch.compiler.is_compiling():  # a compiler finds shared computations itself
            return self.parts(x, y, None, weight) if every_step else _eager_step(self, x, y)
        # Callers of a transform, such as vmap, handle its errors.
        with share_in_step(), nullcontext() if in_transform() else report_arguments("x", "y"):
            if every_step:
                return self.parts(x, y, None, weight)
            return self.with_cached_kl(self.parts, x, y)

    def outputs(self, x: Any) -> Any:
        """The output of the model for a batch, or the part that `output` selects.

        Args:
            x: a batch of inputs.

        Returns:
            The output.
        """
        returned = call_net(self.net, clone_batch(x))
        return returned if self.output is None else self.output(returned)

    def with_cached_kl(self, parts: Callable[..., ELBOParts], x: Any, y: Any) -> ELBOParts:
        """`parts(x, y, latest)`, with the stored KL as `latest`, or None if it must be computed.

        Args:
            parts: a function such as the method `parts`.
            x: a batch of inputs.
            y: its targets.

        Returns:
            The loss and its parts.
        """
        if self.kl_value_every == 1 or not self.training:
            return parts(x, y, None)
        due = self._step % self.kl_value_every == 0
        self._step += 1
        loss_parts = parts(x, y, None if due else self._latest_kl)
        if due:
            self._latest_kl = loss_parts.kl.detach().clone()  # a graph may write over its outputs
        return loss_parts

    def parts(
        self, x: Any, y: Any, latest: Tensor | None = None, weight: Tensor | None = None
    ) -> ELBOParts:
        """The loss and its parts. With `latest` the value of the KL is not computed.

        Args:
            x: a batch of inputs.
            y: its targets.
            latest: a KL to report instead of the current one.
            weight: one weight per example, or None.

        Returns:
            The loss and its parts.
        """
        noisy = [m for m in self.net.modules() if isinstance(m, Noisy)]
        head = next((m for m in noisy if isinstance(m, Head)), None)
        if head is not None and weight is not None:
            raise VardropError(
                f"Expected no `weight` for a model with a head, which has its own loss, but got "
                f"{describe_value(weight)}. Repeat the examples instead."
            )
        terms = [self._data_term(x, y, weight, head) for _ in range(self.samples)]
        draws = zip(*terms, strict=True)
        means = [d[0] if self.samples == 1 else torch.stack(d).mean() for d in draws]
        loss, nll, parts = *means[:2], None if head is None else HeadParts(*means)
        divergence = sum_kl(noisy, value=latest is None)
        if divergence is None:
            divergence = torch.zeros((), device=nll.device)
        if latest is not None:
            divergence = divergence - divergence.detach() + latest
        loss = loss + self.beta * divergence / self.num_data
        return ELBOParts(loss, nll, divergence, self.beta, parts)

    def _data_term(
        self, x: Any, y: Any, weight: Tensor | None, head: Head | None
    ) -> tuple[Tensor, ...]:
        """The loss without the KL, and the NLL, for one draw. A head has more parts."""
        traced = torch.compiler.is_compiling() or in_transform()
        if self.batched and isinstance(x, Mapping) and not traced:  # a check would break the graph
            check_named(x)
        if head is not None:
            if y.dim() > 1 and getattr(self.likelihood, "class_axis", None) != -1:
                raise VardropError(
                    f"Expected `likelihood` to be Categorical(class_axis=-1) for a head over "
                    f"positions (targets of shape {tuple(y.shape)}), whose classes are last, but "
                    f"got {self.likelihood!r}."
                )
            return head.loss_in(self.net, clone_batch(x), y)
        output = self.outputs(x)
        picked = isinstance(output, Tensor) or self.output is not None
        if not picked and isinstance(self.likelihood, Likelihood):
            output = output_tensor(output)  # a custom loss gets the complete output
        if not traced:
            self._check_batch(output, y, weight)
        if weight is None:
            return (self.likelihood(output, y),) * 2
        if not isinstance(self.likelihood, Likelihood):
            raise VardropError(
                f"Expected `likelihood` to be one of vardrop's for a `weight`, but got "
                f"{describe_value(self.likelihood)}. Weigh the examples inside of it."
            )
        each = -self.likelihood.log_prob(output.unsqueeze(0), y)
        check_tensor("weight", weight)
        if weight.shape != each.shape:
            raise VardropError(
                f"Expected `weight` to have one number for each of {len(each)} examples, but got "
                f"shape {tuple(weight.shape)}."
            )
        return ((weight * each).mean(),) * 2

    def _check_batch(self, output: Any, y: Any, weight: Tensor | None) -> None:
        """Raise if targets or weights do not fit, or if `num_data` is not the number of examples.

        The loss has to be a mean over examples, which is checked for a custom loss at first.
        """
        check_batch(self.likelihood, output, y)
        count = len(output) if isinstance(output, Tensor) and output.dim() else 0
        if self._has_kl and self.training and torch.is_grad_enabled() and count > self.num_data:
            text = f"Expected `num_data`, the size of the training set, but got {self.num_data}"
            raise VardropError(f"{text} and a batch of {count} examples. It scales the KL.")
        low, high = (0.0, 0.0) if weight is None else _range(weight)
        if not (low >= 0 and high <= LARGEST_WEIGHT):
            limits = f"0 to {LARGEST_WEIGHT:g}, but got {low:g} to {high:g}"
            raise VardropError(f"Expected `weight` to be from {limits}.")
        if self._loss_is_checked:
            return
        self._loss_is_checked = True
        twice = tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (output, y))
        with torch.no_grad():
            once, doubled = float(self.likelihood(output, y)), float(self.likelihood(*twice))
        if math.isfinite(once) and not math.isclose(once, doubled, rel_tol=1e-3, abs_tol=1e-6):
            raise VardropError(
                f"Expected `likelihood` to be a mean over examples, but got {once:g} for a batch "
                f"and {doubled:g} for the same examples twice. The KL would have a wrong weight. "
                "Use reduction='mean', or divide by the number of examples."
            )


_eager_step = disable_compiler(
    lambda elbo, x, y: elbo.with_cached_kl(elbo.parts, x, y),
    "`kl_value_every` counts steps, so it takes two graphs: one with the value of the KL and one "
    "without. Use kl_value_every=1 with fullgraph=True, or vardrop.compile.",
)


def check_batch(likelihood: Any, output: Any, y: Any) -> None:
    """Raise if targets do not fit a `Bernoulli` or `Categorical` likelihood."""
    if not isinstance(likelihood, Bernoulli | Categorical):
        return
    check_tensor("net(x)", output, "Wrap the net in a module that returns one tensor.")
    check_tensor("y", y)
    if output.dim() > 0 and len(output) == 0:
        raise VardropError(
            f"Expected a batch of at least one example, but got an output of shape "
            f"{tuple(output.shape)}. Leave out empty batches: their mean is not defined."
        )
    if isinstance(likelihood, Bernoulli):
        _check_probabilities(output, y)
        return
    if y.is_floating_point() and y.shape == output.shape:
        return  # probabilities of the classes
    axis = likelihood.class_axis if output.dim() > 1 else 0
    expected = output.select(axis, 0).shape
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != expected:
        raise VardropError(
            f"Expected `y` to hold class indices of shape {tuple(expected)}, but got {y.dtype} of "
            f"shape {tuple(y.shape)}. Convert it with y.long(), reshape it, or pass the axis of "
            "the classes: Categorical(class_axis=-1)."
        )
    low, high = _range(y)
    if low <= likelihood.ignore_index <= high:
        valid = y[likelihood.valid_mask(y)]
        if y.dim() > 1 or not valid.numel():
            likelihood.check_valid(y)
        low, high = _range(valid)
    classes = output.shape[axis]
    if classes < 2:
        likelihood.check_outcomes(output.shape)
    if low < 0 or high >= classes:
        raise VardropError(
            f"Expected `y` to be in 0..{classes - 1}, but got {low:g}..{high:g}. "
            "Count classes from 0, and use a net with one output per class."
        )


def _check_probabilities(output: Tensor, y: Tensor) -> None:
    if y.shape != output.shape:
        raise VardropError(
            f"Expected `y` to have the shape {tuple(output.shape)} of the output, but got "
            f"{tuple(y.shape)}. Reshape the target."
        )
    low, high = _range(y)
    if not (low >= 0 and high <= 1):
        raise VardropError(
            f"Expected `y` to be between 0 and 1, but got {low:g}..{high:g}. "
            "It is the probability of a one. Use Gaussian() for other numbers."
        )


def _range(y: Tensor) -> tuple[float, float]:
    """The smallest and the largest value, or zeros if reading them is impossible or expensive."""
    if type(y) is not Tensor or in_transform() or not y.is_cpu or y.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(y)
    return low.item(), high.item()
