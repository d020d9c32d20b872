"""Calls that are refused: a VardropError, what it says, and a net that is as it was."""

import copy
from contextlib import contextmanager

import pytest
import torch

from vardrop._core.errors import VardropError


def assert_refused(match, call, /, *args, **kwargs):
    """The call raises a VardropError whose text matches."""
    with pytest.raises(VardropError, match=match):
        call(*args, **kwargs)


def state(net):
    """All of a net but the values of its tensors, to compare."""
    modules = list(net.modules())
    return {
        "types": [type(m) for m in modules],
        "attributes": [sorted(vars(m)) for m in modules],
        "registries": [id(m._parameters) for m in modules],
        "parameters": [(n, id(p), p.requires_grad) for n, p in net.named_parameters()],
        "modes": [(m.training, getattr(m, "sampling", None)) for m in modules],
        "estimators": [getattr(m, "estimator", None) for m in modules],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
    }


@contextmanager
def unchanged(net, failure=VardropError, match=None):
    """The block raises, and the net is as it was before."""
    before, values = state(net), copy.deepcopy(net.state_dict())
    with pytest.raises(failure, match=match):
        yield
    assert state(net) == before
    for key, tensor in net.state_dict().items():
        same = tensor.is_meta or torch.equal(tensor.nan_to_num(), values[key].nan_to_num())
        assert same, key
