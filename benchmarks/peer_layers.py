"""How each library makes a noisy net of a plain one, and where it says its KL is.

Runs in the library's own environment and imports it when asked for. Every library is used as its
documentation shows, with its default prior and its default KL. Beside each stands our own net with
noise of the same kind.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from goals import LAST
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A noisy net: a call with noise, the KL of the latest call, and what is learned.

    `loss` is the objective of a library that has one.
    """

    net: nn.Module
    forward: Callable[[Tensor], Tensor]
    kl: Callable[[], Tensor]
    parameters: Callable[[], Iterable[Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


NUM_DATA = 60_000
Build = Callable[[nn.Module, Tensor], Model]
Make = Callable[[Any], nn.Module]


def _swap(net: nn.Module, linear: Make, conv: Make) -> nn.Module:
    net = copy.deepcopy(net).train()
    for name, module in list(net.named_modules()):
        if type(module) in (nn.Linear, nn.Conv2d):
            make = linear if type(module) is nn.Linear else conv
            net.set_submodule(name, make(module))
    return net


def _model(net: nn.Module, kl: Callable[[], Tensor]) -> Model:
    return Model(net, net, kl, net.parameters)


def _vardrop(estimator: str, prior: str = "LogUniform", **arguments: float) -> Build:
    def build(net: nn.Module, x: Tensor) -> Model:
        vd = import_module("vardrop")
        prior_value = getattr(vd, prior)(**arguments)
        recipe = vd.Recipe(vd.AdditiveGaussian(), prior_value, getattr(vd, estimator))
        noisy = vd.convert(copy.deepcopy(net).train(), recipe)
        elbo = vd.ELBO(noisy, vd.Categorical(), NUM_DATA)
        return Model(
            noisy, noisy, lambda: vd.kl(noisy), noisy.parameters, lambda x, y: elbo(x, y).loss
        )

    return build


def torchbnn(net: nn.Module, x: Tensor) -> Model:
    bnn = import_module("torchbnn")
    noisy = _swap(
        net,
        lambda m: bnn.BayesLinear(0, 0.1, m.in_features, m.out_features, m.bias is not None),
        lambda m: bnn.BayesConv2d(
            0, 0.1, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            bias=m.bias is not None,
        ),
    )  # fmt: skip
    divergence = bnn.BKLLoss()
    return _model(noisy, lambda: divergence(noisy).squeeze())


class _WithKL(nn.Module):
    """A layer that returns (output, kl), inside a net that passes one tensor on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.kl = layer, None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # a prediction needs no KL
            return self.layer(x, return_kl=False)  # type: ignore[no-any-return]
        y, self.kl = self.layer(x)
        return y  # type: ignore[no-any-return]


def _bayesian_torch(kind: str) -> Build:
    def build(net: nn.Module, x: Tensor) -> Model:
        layers = import_module("bayesian_torch.layers")
        linear, conv = getattr(layers, f"Linear{kind}"), getattr(layers, f"Conv2d{kind}")
        noisy = _swap(
            net,
            lambda m: _WithKL(linear(m.in_features, m.out_features, bias=m.bias is not None)),
            lambda m: _WithKL(
                conv(
                    m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], m.padding[0],
                    bias=m.bias is not None,
                )
            ),
        )  # fmt: skip
        found = [m for m in noisy.modules() if isinstance(m, _WithKL)]
        return _model(noisy, lambda: sum(m.kl for m in found))  # type: ignore[misc]

    return build


def blitz(net: nn.Module, x: Tensor) -> Model:
    modules, losses = import_module("blitz.modules"), import_module("blitz.losses")
    noisy = _swap(
        net,
        lambda m: modules.BayesianLinear(m.in_features, m.out_features, m.bias is not None),
        lambda m: modules.BayesianConv2d(
            m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, padding=m.padding,
            bias=m.bias is not None,
        ),
    )  # fmt: skip
    return _model(noisy, lambda: losses.kl_divergence_from_nn(noisy))


def _hollow(package: str, *rooms: str) -> None:
    """Let submodules import without the package's own __init__, which asks for Lightning."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for name in ("", *rooms):
        full = f"{package}.{name}" if name else package
        module = ModuleType(full)
        module.__path__ = [str(folder / name)]
        sys.modules.setdefault(full, module)


def torch_uncertainty(net: nn.Module, x: Tensor) -> Model:
    if "torch_uncertainty" not in sys.modules:
        _hollow("torch_uncertainty", "layers", "losses", "utils")
    layers = import_module("torch_uncertainty.layers.bayesian")
    losses = import_module("torch_uncertainty.losses.bayesian")
    noisy = _swap(
        net,
        lambda m: layers.BayesLinear(m.in_features, m.out_features, bias=m.bias is not None),
        lambda m: layers.BayesConv2d(
            m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            bias=m.bias is not None,
        ),
    )  # fmt: skip
    divergence = losses.KLDiv(noisy)
    return _model(noisy, lambda: divergence().squeeze())


def _cplxmodule(kind: str) -> Build:
    def build(net: nn.Module, x: Tensor) -> Model:
        relevance = import_module("cplxmodule.nn.relevance")
        linear, conv = getattr(relevance, f"Linear{kind}"), getattr(relevance, f"Conv2d{kind}")
        noisy = _swap(
            net,
            lambda m: linear(m.in_features, m.out_features, bias=m.bias is not None),
            lambda m: conv(
                m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
                bias=m.bias is not None,
            ),
        )  # fmt: skip
        return _model(noisy, lambda: sum(relevance.penalties(noisy)))  # type: ignore[misc,arg-type]

    return build


def pytorch_ard(net: nn.Module, x: Tensor) -> Model:
    ard = import_module("torch_ard")
    noisy = _swap(
        net,
        lambda m: ard.LinearARD(m.in_features, m.out_features, m.bias is not None),
        # It offers no bias for convolutions: theirs are one vector smaller.
        lambda m: ard.Conv2dARD(m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding),
    )
    return _model(noisy, lambda: ard.get_ard_reg(noisy))


def tyxe(net: nn.Module, x: Tensor) -> Model:
    library, dist = import_module("tyxe"), import_module("pyro.distributions")
    import_module("pyro").settings.set(module_local_params=True)  # one net's stay out of another's
    noisy = library.PytorchBNN(
        copy.deepcopy(net).train(),
        library.priors.IIDPrior(
            dist.Normal(0, 1), expose_all=False, hide_module_types=(nn.BatchNorm2d, nn.LayerNorm)
        ),
        lambda module: library.guides.AutoNormal(module, init_scale=1e-2),
    )

    def forward(x: Tensor) -> Tensor:
        with library.poutine.local_reparameterization():
            return noisy(x)  # type: ignore[no-any-return]

    parameters = list(noisy.pytorch_parameters(x))
    return Model(noisy, forward, lambda: noisy.cached_kl_loss, lambda: parameters)


LRT, DRAWS = "vardrop, LRT", "vardrop, weight draws"
OURS = (LRT, DRAWS)
# By environment: the name of a way to use the library, and how to build it.
BUILDS: dict[str, dict[str, Build]] = {
    "torchbnn": {"torchbnn": torchbnn},
    "bayesian-torch": {
        "bayesian-torch": _bayesian_torch("Reparameterization"),
        "bayesian-torch flipout": _bayesian_torch("Flipout"),
    },
    "blitz": {"BLiTZ": blitz},
    "torch-uncertainty": {"torch-uncertainty": torch_uncertainty},
    "cplxmodule": {"cplxmodule VD": _cplxmodule("VD"), "cplxmodule ARD": _cplxmodule("ARD")},
    "pytorch-ard": {"pytorch_ard": pytorch_ard},
    "tyxe": {"TyXe": tyxe},
}
LOCAL = ("cplxmodule", "pytorch-ard", "tyxe")  # with local reparameterisation
FASTEST = ("torchbnn", "bayesian-torch", "cplxmodule")  # each ahead of the others somewhere


# By environment: our noise and KL of the same kind. The prior of the sampled KLs is a mixture.
_BESIDE: dict[str, dict[str, Build]] = {
    "torchbnn": {DRAWS: _vardrop("weight_sample", "Normal", std=0.1)},
    "bayesian-torch": {DRAWS: _vardrop("weight_sample", "Normal")},
    "blitz": {DRAWS: _vardrop("weight_sample")},
    "torch-uncertainty": {DRAWS: _vardrop("weight_sample")},
    "cplxmodule": {
        LRT: _vardrop("local_reparameterization"),
        f"{LRT} ARD": _vardrop("local_reparameterization", "ARD"),
    },
    "pytorch-ard": {LRT: _vardrop("local_reparameterization")},
    "tyxe": {LRT: _vardrop("local_reparameterization", "Normal")},
}


def beside(peer: str) -> dict[str, Build]:
    """The ways to use a library, and ours with noise and KL of the same kind."""
    return {**_BESIDE[peer], **BUILDS[peer]}


def of_peer(candidate: str) -> bool:
    """Whether a candidate, in whatever memory layout, is another library's."""
    name = candidate.removesuffix(LAST)
    return any(name in builds for builds in BUILDS.values())
