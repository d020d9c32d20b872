"""Random codes: a generator that is the same everywhere, draws of the posterior, files."""

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments import random_code
from experiments.random_code import RandomCode, coded_tensors, deviation
from experiments.trainings import mlp
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance

GAUSSIAN = vd.Recipe(vd.AdditiveGaussian(-4.0), vd.Normal(std=0.5, learned=True), noisy_bias=True)


def in_integers(first, second, key):
    """Philox2x32-10 in Python's own integers."""
    for _ in range(10):
        product = first * 0xD256D193
        first, second = (product >> 32) ^ key ^ second, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return first, second


# Counter, key and result of Philox2x32-10, as its authors publish them.
@pytest.mark.parametrize("counter, key, expected", [
    ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
])  # fmt: skip
def test_the_generator_gives_the_published_numbers(counter, key, expected):
    first, second = random_code.philox(*map(torch.tensor, counter), key)
    assert (int(first), int(second)) == expected == in_integers(*counter, key)


def normal(first, second, lane, key):
    """A normal number of the format, without torch."""
    half = (in_integers(first, second, key)[lane // 2] >> (0 if lane % 2 else 16)) & 0xFFFF
    lower = min(half, 0xFFFF - half)
    size = round(NormalDist().inv_cdf((lower + 0.5) / 2**16) * 4096) / 4096
    return size if half == lower else -size


def test_the_numbers_of_the_format_are_those_of_plain_arithmetic():
    layout = random_code.Layout(weights=37, blocks=5, seed=3)
    keys = [in_integers(number, 0xFFFFFFFF, 3) for number in range(37)]
    order = sorted(range(37), key=lambda i: (keys[i][0] << 31) | (keys[i][1] >> 1))
    assert layout.order.tolist() == order
    starts = list(pairwise(layout.starts.tolist()))
    largest = max(end - start for start, end in starts)
    index = torch.tensor([0, 7, 65_535, 2**24 - 1, 12])
    found = layout.chosen(index)
    for block, (start, end) in enumerate(starts):
        for place in range(end - start):
            word = block * -(-largest // 4) + place // 4
            expected = normal(int(index[block]), word, place % 4, 3)
            assert found[order[start + place]].item() == expected


@pytest.mark.parametrize("tapered", [True, False])
def test_every_weight_belongs_to_one_block(tapered):
    layout = random_code.Layout(weights=1000, blocks=37, seed=1, tapered=tapered)
    sizes = layout.starts.diff()
    assert (sizes[0] > 4 * sizes[-1]) == tapered
    members = [layout.members(block) for block in range(37)]
    assert torch.cat(members).sort().values.equal(torch.arange(1000))
    assert min(len(m) for m in members) >= 1
    for block in (0, 17, 36):
        assert (layout.block[members[block]] == block).all()


def test_candidates_are_standard_normal():
    numbers = random_code.Layout(weights=60, blocks=3, seed=2).candidates(1, 0, 20_000).flatten()
    assert_mean(numbers, 0.0)
    assert_variance(numbers, 1.0)
    assert_mean((numbers > 1.0).double(), 1 - NormalDist().cdf(1.0))


def test_levels_of_the_deviation():
    for std in (1e-3, 0.37, 1.0, 42.0):
        assert abs(math.log2(deviation(random_code.nearest_level(std)) / std)) <= 1 / 16 + 1e-12
    assert all(deviation(k + 8) == 2 * deviation(k) for k in range(-128, 120))


def gaussian_net(*widths, seed=0):
    torch.manual_seed(seed)
    return vd.convert(mlp(*widths)[1:], GAUSSIAN)


def test_drawn_weights_follow_the_posterior():
    """With many more candidates than the KL asks for, weights are draws of q: z < 4.9 for each."""
    recipe = vd.Recipe(vd.AdditiveGaussian(math.log(0.49)), vd.Normal(std=1.0))
    net = vd.convert(nn.Linear(100, 60, bias=False), recipe)
    net.weight.data.fill_(0.5)
    torch.manual_seed(0)
    # Four weights with 1.3 bits of KL.
    code = RandomCode(net, bits=1500 * 12, block_bits=12, tapered=False)
    assert float(code.block_kl().detach().mean()) / math.log(2) < 2
    code.close()
    drawn = net.weight.detach().flatten()
    assert_mean(drawn, 0.5)
    assert_variance(drawn, 0.49)


def test_the_nearest_candidate_is_taken():
    net = gaussian_net(4, 3)
    tensors = coded_tensors(net).items()
    tensors = {k: (t.mean.detach().clone(), t.variance().detach()) for k, t in tensors}
    code = RandomCode(net, bits=30, block_bits=6)
    code.close(nearest=True)
    mean = torch.cat([m.flatten() for m, _ in tensors.values()])
    sigma = torch.cat([v.sqrt().flatten() for _, v in tensors.values()])
    levels = {k: deviation(level) for k, level in code.levels().items()}
    scale = torch.cat([m.new_full((m.numel(),), levels[k]) for k, (m, _) in tensors.items()])
    for block in range(5):
        own = code.layout.members(block)
        found = code.layout.candidates(block, 0, 2**6) * scale[own]
        far = ((found - mean[own]) / sigma[own]).square().sum(1)
        assert int(code.index[block]) == int(far.argmin())


def test_coded_weights_stay_where_they_are_while_others_learn():
    net = gaussian_net(6, 8, 3)
    code = RandomCode(net, bits=60, block_bits=6, seed=4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for step in range(12):
        if step >= 2:
            code.close(blocks=1)
        before = {k: t.mean.detach().clone() for k, t in coded_tensors(net).items()}
        (nn.functional.cross_entropy(net(x), y) + code() / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        code.steer()
        closed = (code.index >= 0)[code.block].split([t.numel() for t in before.values()])
        values = code.values()
        for (name, old), part in zip(before.items(), closed, strict=True):
            new, fixed = coded_tensors(net)[name].mean.detach(), part.view(old.shape)
            assert torch.equal(new[fixed], values[name][fixed])
            assert (new[~fixed] != old[~fixed]).all()
    assert code.open == 0
    assert all(torch.equal(t.mean, values[k]) for k, t in coded_tensors(net).items())
    assert float(code().detach()) == 0.0


def test_the_state_is_all_that_a_code_needs():
    net = gaussian_net(6, 5)
    code = RandomCode(net, bits=40, block_bits=8, beta=0.5)
    assert torch.allclose(code(), 0.5 * vd.kl(net), rtol=1e-5)
    (code() / 10).backward()
    code.steer()
    code.close(blocks=3)
    other = gaussian_net(6, 5, seed=1)
    again = RandomCode(other, bits=40, block_bits=8, beta=0.5)
    again.close()
    again.load_state_dict(code.state_dict())
    other.load_state_dict(net.state_dict())
    assert again.open == code.open == 2
    assert all(torch.equal(v, again.values()[k]) for k, v in code.values().items())
    again.steer()
    code.steer()
    assert torch.equal(again.beta, code.beta)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def tied():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    return vd.convert(net, vd.bayes_by_backprop())


def one(recipe):
    return vd.convert(nn.Sequential(nn.Linear(3, 2)), recipe)


SIZE = {"bits": 16}


@pytest.mark.parametrize("make, options, error", [
    (lambda: nn.Linear(2, 2), SIZE, "Expected `net` to have noisy modules"),
    (lambda: one(vd.sparse_vd()), SIZE, r"'0.weight' to have a Normal prior of mean 0 .* LogUniform"),
    (lambda: one(vd.variational_dropout()), SIZE, r"'0.weight' to have the posterior AdditiveGaussian .* but got MultiplicativeGaussian"),
    (lambda: one(vd.bayes_by_backprop(vd.Normal("pretrained"))), SIZE, "a Normal prior of mean 0"),
    (lambda: one(vd.l0()), SIZE, "Expected noise on weights alone for a random code, but got '0'"),
    (lambda: one(vd.dropmax()), SIZE, "Expected noise on weights alone for a random code, but got '0'"),
    (tied, SIZE, "Expected every noisy tensor to belong to one layer"),
    (lambda: one(GAUSSIAN), {"bits": 64, "block_bits": 25}, r"Expected `block_bits` in 1..24"),
    (lambda: one(GAUSSIAN), {"bits": 64, "seed": 2**32}, r"`seed` in 0..2\^32 - 1, but got 16 and 4294967296"),
    (lambda: one(GAUSSIAN), {"bits": 9, "block_bits": 1}, "Expected at most one block per weight, but got 9 blocks"),
])  # fmt: skip
def test_models_and_codes_that_do_not_fit_are_refused(make, options, error):
    assert_refused(error, RandomCode, make(), **options)


def test_a_net_that_diverged_is_refused():
    net = one(GAUSSIAN)
    code = RandomCode(net, bits=16, block_bits=4)
    net[0].weight.data[1, 1] = math.nan
    assert_refused(r"'0.weight' to have finite means and variances", code.close)
    assert code.open == 4


def make(width=200):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, width),
        nn.ReLU(), nn.Linear(width, 3),
    )  # fmt: skip


def coded(seed=7):
    net = make(9)
    net[1].running_mean.normal_()
    net[1].num_batches_tracked.fill_(12)
    net = vd.convert(net.to(memory_format=torch.channels_last), GAUSSIAN)
    code = RandomCode(net, bits=600, block_bits=10, seed=seed)
    code.close()
    return net.eval(), code


def test_the_coded_net_comes_back_from_a_small_file(tmp_path):
    net, code = coded(seed=2**32 - 1)
    size = random_code.write_code(code, tmp_path / "net.vdr")
    kept = 4 * 16 + 8  # BatchNorm: four tensors of four numbers, and a counter
    assert (tmp_path / "net.vdr").stat().st_size == size == 600 // 8 + kept + 42
    full = make()
    read = random_code.read_code(tmp_path / "net.vdr", full)
    assert (full[4].out_features, read[4].out_features) == (200, 9)
    own = net.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in read.state_dict().items())
    assert all(torch.equal(read.get_parameter(k), value) for k, value in code.values().items())
    x = torch.linspace(-1, 1, 2 * 36).view(2, 1, 6, 6)
    with torch.no_grad():
        assert torch.equal(read(x), net(x))


def test_a_changed_byte_and_an_open_block_are_refused(tmp_path):
    (_, code), path = coded(), tmp_path / "net.vdr"
    random_code.write_code(code, path)
    raw = path.read_bytes()
    for place in (0, 9, 40, len(raw) - 1):
        changed = bytearray(raw)
        changed[place] ^= 16
        path.write_bytes(changed)
        assert_refused("its mark or checksum differ", random_code.read_code, path, make())
    code.index[3] = -1
    assert_refused("all blocks to be closed, but 1 are open", random_code.write_code, code, path)
