"""Attention with noisy projections and gated heads, beside torch's own layer and explicit sums."""

import copy
import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance
from vardrop.compression import zero_pruned_weights

QUIET = vd.Recipe(vd.AdditiveGaussian(log_sigma2=-80.0), vd.Normal(), vd.weight_sample)
OPTIONS = [
    {}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 5},
    {"kdim": 6, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
]  # fmt: skip


def tensors(options, batch_first, batch=3, target=4, source=5):
    own = torch.Generator().manual_seed(2)
    widths = ((target, 8), (source, options.get("kdim", 8)), (source, options.get("vdim", 8)))
    q, k, v = (torch.randn(batch, n, w, generator=own).double() for n, w in widths)
    return (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))


def pair(options, batch_first=True, recipe=QUIET):
    plain = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).double()
    return plain, vd.convert(copy.deepcopy(plain), recipe)


PADDING = torch.tensor([[False] * 3 + [True] * 2, [False] * 5, [False] * 5])
HIDDEN = torch.zeros(3, 5).double().masked_fill(PADDING, float("-inf"))
SCORES = torch.randn(4, 5).double()
MASKS = [  # for the noisy layer, and for torch's, which wants masks of one type
    ({}, {}),
    ({"key_padding_mask": PADDING},) * 2,
    ({"attn_mask": SCORES, "key_padding_mask": PADDING}, {"attn_mask": SCORES, "key_padding_mask": HIDDEN}),
    ({"attn_mask": torch.randn(6, 4, 5).double()},) * 2,
    ({"attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2)},) * 2,
]  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_noise_that_vanishes_it_is_torchs_layer(options, batch_first, need_weights):
    (plain, noisy), inputs = pair(options, batch_first), tensors(options, batch_first)
    for ours, torchs in MASKS:
        found = noisy(*inputs, need_weights=need_weights, **ours)
        expected = plain(*inputs, need_weights=need_weights, **torchs)
        assert (found[1] is None) == (expected[1] is None) == (not need_weights)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_inputs_and_weights_per_head(batch_first):
    plain, noisy = pair({}, batch_first)
    x, other = torch.randn(4, 8).double(), torch.randn(5, 8).double()
    for inputs in ((x, x, x), (x, other, other)):
        both = (layer(*inputs, average_attn_weights=False) for layer in (noisy, plain))
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


ESTIMATORS = [vd.local_reparameterization, vd.weight_sample, vd.per_example, vd.flipout]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_values_have_the_moments_of_their_weights(same, estimator):
    """With one key there is nothing to attend to: the output is the projected value."""
    recipe = vd.Recipe(vd.AdditiveGaussian(log_sigma2=-1.0), vd.Normal(), estimator)
    _, noisy = pair({"bias": False}, recipe=recipe)
    noisy.out_proj.weight.data.copy_(torch.eye(8))
    noisy.out_proj.log_sigma2.data.fill_(-80.0)
    noisy.train()
    x = torch.randn(1, 1, 8).double()
    memory = x if same else torch.randn(1, 1, 8).double()
    draws = torch.stack([noisy(x, memory, memory)[0].flatten() for _ in range(1500)]).detach()
    mean = noisy.in_proj_weight[16:] @ memory.flatten()
    variance = math.exp(-1.0) * memory.square().sum().expand(8)
    assert_mean(draws, mean.detach())
    assert_variance(draws, variance.detach())


@pytest.mark.parametrize("recipe", [vd.l0(), vd.beta_bernoulli(), vd.concrete_dropout()], ids=repr)
def test_gates_act_on_whole_heads(recipe):
    _, noisy = pair({}, recipe=recipe)
    assert noisy.gate.units == 2
    x, heads = torch.randn(3, 4, 8).double(), []
    noisy.gate.register_forward_hook(lambda m, args, out: heads.append((args[0], out)))
    noisy.eval()(x, x, x)
    before, after = (part.detach() for part in heads[0])
    assert before.shape == (3, 2, 4, 4)
    torch.testing.assert_close(after / before, (after / before)[:1, :, :1, :1].expand(before.shape))


def test_a_dead_head_leaves_the_plain_layer():
    _, noisy = pair({}, recipe=vd.l0())
    with torch.no_grad():
        next(noisy.gate.parameters())[1] = -20.0
    x = torch.randn(3, 4, 8).double()
    small, _ = zero_pruned_weights(nn.ModuleDict({"a": noisy}).eval())
    assert type(small["a"]) is nn.MultiheadAttention
    assert not small["a"].out_proj.weight[:, 4:].any()
    torch.testing.assert_close(small["a"](x, x, x)[0], noisy(x, x, x)[0])


def test_kl_counts_the_output_projection_once():
    _, noisy = pair({}, recipe=vd.bayes_by_backprop())
    tensors = (*noisy.noisy_tensors().values(), *noisy.out_proj.noisy_tensors().values())
    torch.testing.assert_close(vd.kl(noisy), sum(t.kl() for t in tensors))
    torch.testing.assert_close(noisy.kl(), vd.kl(noisy))


def test_transformers_convert_whole_and_draw():
    net, x = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval(), torch.randn(2, 2, 5, 16)
    assert not [s for s in vd.plan(net, vd.sparse_vd()).skips if "norm" not in s.name]
    with torch.no_grad():
        before = net(*x)
        vd.convert(net, vd.sparse_vd(log_sigma2=-4.0))
        assert torch.equal(net(*x), before)
        for name, module in vd.noisy.noisy_modules(net).items():  # each of them draws, alone
            with vd.sampling(module):
                assert not torch.equal(net(*x), before), name
        assert torch.equal(vd.revert(net)(*x), before)


def test_attention_that_is_causal_needs_a_mask():
    x = torch.randn(2, 3, 8).double()
    assert_refused("`attn_mask` where `is_causal`", pair({})[1], x, x, x, is_causal=True)


def test_a_padded_sequence_has_a_key_left_with_add_zero_attn():
    plain, noisy = pair({"add_zero_attn": True})
    q, padded = torch.randn(2, 3, 8).double(), torch.tensor([[False] * 3, [True] * 3])
    both = (layer(q, q, q, key_padding_mask=padded)[0] for layer in (noisy, plain))
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)
