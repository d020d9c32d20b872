"""Attention with noisy projections and gated heads, beside torch's own layer and explicit sums."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.statistics import assert_mean, assert_variance
from vardrop.compression import masked
from vardrop.noisy import noisy_modules

QUIET = vd.Recipe(vd.AdditiveGaussian(log_sigma2=-80.0), vd.Normal(), vd.weight_sample)
OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 6, "vdim": 5},
    {"kdim": 6, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
]


def tensors(options, batch_first, batch=3, target=4, source=5):
    own = torch.Generator().manual_seed(2)
    widths = ((target, 8), (source, options.get("kdim", 8)), (source, options.get("vdim", 8)))
    q, k, v = (torch.randn(batch, n, w, generator=own).double() for n, w in widths)
    return (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))


def pair(options, batch_first=True, recipe=QUIET):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).double()
    noisy = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).double()
    noisy.load_state_dict(plain.state_dict())
    return plain, vd.convert(noisy, recipe)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_noise_that_vanishes_it_is_torchs_layer(options, batch_first, need_weights):
    plain, noisy = pair(options, batch_first)
    q, k, v = tensors(options, batch_first)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    per_head = torch.randn(6, 4, 5).double()
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(4, 5).double(), "key_padding_mask": padding},
        {"attn_mask": per_head},
        {"attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(2)},
    ):
        if masks.keys() == {"attn_mask", "key_padding_mask"}:  # torch wants masks of one type
            hidden = torch.zeros(3, 5).double().masked_fill(padding, float("-inf"))
            expected = plain(
                q, k, v, need_weights=need_weights, **{**masks, "key_padding_mask": hidden}
            )
        else:
            expected = plain(q, k, v, need_weights=need_weights, **masks)
        found = noisy(q, k, v, need_weights=need_weights, **masks)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
        assert (found[1] is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_inputs_and_weights_per_head(batch_first):
    plain, noisy = pair({}, batch_first)
    x, other = torch.randn(4, 8).double(), torch.randn(5, 8).double()
    for inputs in ((x, x, x), (x, other, other)):
        expected = plain(*inputs, average_attn_weights=False)
        found = noisy(*inputs, average_attn_weights=False)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


ESTIMATORS = [vd.local_reparameterization, vd.weight_sample, vd.per_example, vd.flipout]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_values_have_the_moments_of_their_weights(same, estimator):
    """With one key there is nothing to attend to: the output is the projected value."""
    recipe = vd.Recipe(vd.AdditiveGaussian(log_sigma2=-1.0), vd.Normal(), estimator)
    _, noisy = pair({"bias": False}, recipe=recipe)
    with torch.no_grad():
        noisy.out_proj.weight.copy_(torch.eye(8))
        noisy.out_proj.log_sigma2.fill_(-80.0)
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
    x = torch.randn(3, 4, 8).double()
    with torch.no_grad():
        noisy.eval()
        heads = []
        handle = noisy.gate.register_forward_hook(lambda m, args, out: heads.append((args[0], out)))
        noisy(x, x, x)
        handle.remove()
    before, after = heads[0]
    assert before.shape == (3, 2, 4, 4)
    factor = after / before
    torch.testing.assert_close(factor, factor[:1, :, :1, :1].expand_as(factor))


def test_a_dead_head_leaves_the_plain_layer():
    _, noisy = pair({}, recipe=vd.l0())
    with torch.no_grad():
        next(noisy.gate.parameters())[1] = -20.0
    x = torch.randn(3, 4, 8).double()
    net = nn.ModuleDict({"a": noisy}).eval()
    small, _ = masked(net)
    assert type(small["a"]) is nn.MultiheadAttention
    assert not small["a"].out_proj.weight[:, 4:].any()
    torch.testing.assert_close(small["a"](x, x, x)[0], noisy(x, x, x)[0])


def test_kl_counts_the_output_projection_once():
    _, noisy = pair({}, recipe=vd.bayes_by_backprop())
    own = [t.kl() for t in noisy.noisy_tensors().values()]
    own += [t.kl() for t in noisy.out_proj.noisy_tensors().values()]
    torch.testing.assert_close(vd.kl(noisy), torch.stack(own).sum())
    torch.testing.assert_close(noisy.kl(), vd.kl(noisy))


def test_transformers_convert_whole_and_draw():
    torch.manual_seed(0)
    net = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    plan = vd.plan(net, vd.sparse_vd())
    assert not [s for s in plan.skips if "norm" not in s.name]
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        before = net(source, target)
        vd.convert(net, vd.sparse_vd(log_sigma2=-4.0))
        assert torch.equal(net(source, target), before)
        with vd.sampling(net):
            assert not torch.equal(net(source, target), net(source, target))
        # What the plan says is noisy draws noise: module by module, alone.
        for name, module in noisy_modules(net).items():
            with vd.sampling(module):
                assert not torch.equal(net(source, target), before), name
        vd.revert(net)
        assert torch.equal(net(source, target), before)


def test_what_attention_refuses():
    _, noisy = pair({})
    x = torch.randn(2, 3, 8).double()
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    hidden[1] = True
    with pytest.raises(vd.VardropError, match="`key_padding_mask` to leave a key.*row 1"):
        noisy(x, x, x, key_padding_mask=hidden)
    with pytest.raises(vd.VardropError, match="`attn_mask` where `is_causal`"):
        noisy(x, x, x, is_causal=True)


def test_a_padded_sequence_has_a_key_left_with_add_zero_attn():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)
    q, padded = torch.randn(2, 3, 8), torch.tensor([[False] * 3, [True] * 3])
    expected = layer(q, q, q, key_padding_mask=padded)[0]
    noisy = vd.convert(layer, vd.bayes_by_backprop()).eval()
    torch.testing.assert_close(noisy(q, q, q, key_padding_mask=padded)[0], expected)
