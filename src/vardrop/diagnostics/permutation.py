"""Is the noise informative? Permute the variances inside each layer and see what is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_integer, check_net, check_number, check_type
from vardrop._core.errors import VardropError
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class PermutationTest:
    """A score of the net itself, and of copies with permuted variances."""

    before: float
    after: Tensor  # one score per permutation

    @property
    def drop(self) -> float:
        """What permuting costs on average."""
        return self.before - self.after.mean().item()

    def __str__(self) -> str:
        spread = self.after.std().item() if len(self.after) > 1 else 0.0
        return f"{self.before:.4f} -> {self.after.mean().item():.4f} +- {spread:.4f}"


@dataclass(frozen=True)
class Permuted(Posterior):
    """Another posterior whose deviations are shuffled among the weights of a layer.

    w_i = E w_i + (w_p(i) - E w_p(i)) with a permutation p that the seed fixes.

    >>> import torch, vardrop as vd
    >>> q = Permuted(vd.AdditiveGaussian(), seed=0)
    >>> q.variance(torch.zeros(3), {"log_sigma2": torch.arange(3.0).log()}).sort().values
    tensor([0., 1., 2.])
    """

    posterior: Posterior
    seed: int

    @property
    def gaussian(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.gaussian

    @property
    def noise_per(self) -> Sharing | None:
        """As the inner posterior says."""
        return self.posterior.noise_per

    @property
    def zero_mean(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.zero_mean

    @property
    def symmetric(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.symmetric

    def _shuffle(self, values: Tensor, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(weight.numel(), generator=generator).to(values.device)
        batch = values.shape[: values.dim() - weight.dim()]
        full = values.expand(*batch, *weight.shape)
        return full.flatten(len(batch))[..., order].view_as(full)

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return self.posterior.initial(weight, axes)

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self._shuffle(self.posterior.variance(weight, tensors), weight)

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        return self.posterior.draw(weight, axes, batch)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return self._shuffle(self.posterior.perturbation(weight, noise, tensors), weight)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.variance(weight, tensors).log() - weight.square().log()


def permute_variances(net: Net, generator: torch.Generator | None = None) -> Net:
    """A copy of a net with the weight variances of every layer shuffled among its weights.

    The means stay where they are. Where the noise holds no information beyond its level, nothing
    is lost; a variance net loses everything. The copy is for evaluation: its layers have no prior.

    Args:
        net: a net with noisy weights; stays as it is.
        generator: of the permutations; torch's global one where None.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> sorted(permute_variances(net).variance().flatten()) == sorted(net.variance().flatten())
    True

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    check_net(net)
    check_type("generator", generator, torch.Generator | None, "a torch.Generator or None")
    shuffled = copy.deepcopy(net)
    seeds: dict[Hashable, int] = {}  # tied layers share their permutation
    for layer in noisy_modules(shuffled).values():
        if isinstance(layer, Variational) and layer.posterior is not None:
            fresh = int(torch.randint(2**62, (), generator=generator))
            seed = seeds.setdefault(layer.kl_key(), fresh)
            layer.posterior, layer.prior = Permuted(layer.posterior, seed), None
    if not seeds:
        raise VardropError(
            "Expected `net` to have noisy weights, but got gates or heads only. "
            "Convert it with a posterior, such as vardrop.sparse_vd()."
        )
    return shuffled


def permutation_test(
    net: nn.Module,
    score: Callable[[nn.Module], float],
    permutations: int = 5,
    generator: torch.Generator | None = None,
) -> PermutationTest:
    """Score a net before and after permuting its variances, over several permutations.

    Args:
        net: a net with noisy weights; stays as it is.
        score: what to measure, such as the ensemble accuracy on a test set.
        permutations: how many.
        generator: of the permutations; torch's global one where None.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> permutation_test(net, lambda net: net.variance().sum().item()).after.shape
    torch.Size([5])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    check_integer("permutations", permutations)
    after = [_scored(score, permute_variances(net, generator)) for _ in range(permutations)]
    return PermutationTest(_scored(score, net), torch.tensor(after, dtype=torch.float64))


def _scored(score: Callable[[nn.Module], float], net: nn.Module) -> float:
    found = score(net)
    number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    check_number("score(net)", number)
    return float(number)
