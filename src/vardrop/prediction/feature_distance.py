"""Out-of-distribution detection by the distance of features to the training data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    BatchOrLoader,
    LabelledData,
    call_net,
    device_of,
    input_batches,
    labelled_batches,
)
from vardrop._core.checks import check_net
from vardrop._core.errors import VardropError
from vardrop._core.modules import hooks
from vardrop.prediction.eval_copy import make_eval_copy

# Added to the variance of a feature, which may be constant: a part of the mean variance, and more.
_RIDGE, _TINY = 1e-6, 1e-30


class FeatureDistance:
    """The Mahalanobis distance of an input to the nearest class, in the last features of a model.

        d(x) = min_k (f(x) - m_k)^T S^-1 (f(x) - m_k)

    f(x) are the inputs of the last dense layer, m_k their mean over the training inputs of class k,
    and S their covariance around these means. A large distance marks an input that is unlike the
    training data. It needs no noise and one pass, so it is the baseline for the entropy and the
    epistemic uncertainty of a noisy model. The model is copied without its noise.

    Args:
        net: a classifier, plain or noisy.
        data: training inputs and their classes: a pair or batches.
        layer: the name of the layer whose inputs are the features; the dense layer that is called
            last by default.

    >>> import torch, vardrop as vd
    >>> x = torch.randn(200, 4)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> distance = vd.FeatureDistance(net, (x, (x[:, 0] > 0).long()))
    >>> bool(distance(10 + x).median() > distance(x).median())
    True

    Lee, Lee, Lee & Shin 2018, "A simple unified framework for detecting out-of-distribution samples
    and adversarial attacks", eq. 2.
    """

    def __init__(self, net: nn.Module, data: LabelledData, layer: str | None = None) -> None:
        check_net(net)
        self.net, self.layer = make_eval_copy(net, noise=False), layer
        pairs = [(self.features(x), y) for x, y in labelled_batches(data)]
        features = torch.cat([part for part, _ in pairs])
        y = torch.cat([target for _, target in pairs]).to(features.device)
        if y.dim() != 1 or y.is_floating_point() or len(y) != len(features):
            raise VardropError(
                f"Expected `data` to have one class index per input, but got targets of shape "
                f"{tuple(y.shape)} and type {y.dtype} for {len(features)} rows of features."
            )
        classes, index = y.unique(return_inverse=True)
        self.means = torch.stack([features[index == k].mean(0) for k in range(len(classes))])
        centred = features - self.means[index]
        covariance = centred.T @ centred / len(y)
        covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean() + _TINY)
        self.inverse = torch.linalg.inv(covariance)

    @torch.no_grad()
    def features(self, x: Batch) -> Tensor:
        """The features of a batch in double precision, shape (N, F).

        Args:
            x: a batch of inputs.

        Returns:
            The inputs of the layer.
        """
        calls: list[Tensor] = []
        named = dict(self.net.named_modules())
        if self.layer is not None and self.layer not in named:
            raise VardropError(f"Expected `layer` to name a module, but got {self.layer!r}.")
        dense = [m for m in named.values() if isinstance(m, nn.Linear)]
        modules = dense if self.layer is None else [named[self.layer]]
        record = lambda _, args: calls.append(args[0])  # noqa: E731
        with hooks(*(m.register_forward_pre_hook(record) for m in modules)):
            call_net(self.net, x)
        if not calls or calls[-1].dim() != 2:
            raise VardropError(
                "Expected a layer with inputs (examples, features), but got "
                f"{tuple(calls[-1].shape) if calls else 'no call of a dense layer'}. "
                "Name such a layer with `layer`."
            )
        return calls[-1].double()

    def __call__(self, x: BatchOrLoader) -> Tensor:
        """The squared distance of every input.

        Args:
            x: inputs: a batch, or a loader of batches.

        Returns:
            Distances, shape (N,).
        """
        parts = []
        for batch in input_batches(device_of(self.net), x):
            gaps = self.features(batch).unsqueeze(1) - self.means
            parts.append(torch.einsum("nki,ij,nkj->nk", gaps, self.inverse, gaps).amin(1))
        return torch.cat(parts)
