"""Files of random codes: what was coded comes back, bit for bit, and nothing else is taken."""

import copy
import hashlib
import json
import math
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop._core.errors import VardropError
from vardrop.compression import packing

GAUSSIAN = vd.Recipe(vd.AdditiveGaussian(-3.0), vd.Normal(std=0.5, learned=True), noisy_bias=True)
MAKE = """
from torch import nn
def make(width=20):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, width),
        nn.ReLU(), nn.Linear(width, 3),
    )
"""
exec(MAKE)
make = globals()["make"]
X = torch.linspace(-1, 1, 2 * 36).view(2, 1, 6, 6)


def coded(width=20, seed=7):
    torch.manual_seed(0)
    net = make(width)
    net[1].running_mean.normal_()
    net[1].num_batches_tracked.fill_(12)
    net = vd.convert(net.to(memory_format=torch.channels_last), GAUSSIAN)
    code = vd.RandomCode(net, bits=1200, block_bits=10, seed=seed)
    code.close()
    return net.eval(), code


def test_the_coded_net_comes_back_in_another_process(tmp_path):
    net, code = coded(width=9)
    path = tmp_path / "net.vdp"
    report = vd.pack(net, path, method="random_code", code=code)
    assert report.bytes == path.stat().st_size
    program = (
        f"import torch, vardrop as vd\n{MAKE}\n"
        f"net = vd.unpack({str(path)!r}, into=make())\n"  # at its full width
        f"vd.save(net, {str(tmp_path / 'read.safetensors')!r})\n"
        "print(type(net[4]).__name__, net[4].out_features)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Linear 9\n"
    found = vd.load(tmp_path / "read.safetensors", into=make()).state_dict()
    own = net.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in found.items())
    assert all(torch.equal(found[name], value) for name, value in code.values().items())
    with torch.no_grad():
        read = vd.unpack(path, into=make())
        assert torch.equal(read(X), net(X))


def test_the_file_holds_the_code_and_little_else(tmp_path):
    net, code = coded()
    report = vd.pack(net, tmp_path / "net.vdp", method="random_code", code=code)
    kept = 4 * 16 + 8  # BatchNorm: four tensors of four numbers, and a counter
    assert 0 < report.bytes - 1200 // 8 - kept < 120
    weights = code.layout.weights
    assert report.bits_per_weight == dict.fromkeys(code.values(), 1200 / weights)
    assert report.dense_bytes == 4 * sum(p.numel() for p in make().parameters())


def test_a_net_is_drawn_at_once_and_left_as_it_is(tmp_path):
    torch.manual_seed(0)
    net = vd.convert(make(), GAUSSIAN)
    before = copy.deepcopy(net.state_dict())
    data = (X, torch.tensor([0, 1]))

    with torch.no_grad():
        mean = net.eval()(X)

    def agreement(output, target):
        return -(output - mean).square().mean()

    report = vd.pack(
        net, tmp_path / "net.vdp", method="random_code", validation=data, metric=agreement
    )
    bits = math.ceil(float(vd.kl(net).detach()) / math.log(2))
    assert 0 <= report.bytes - bits / 8 - 72 < 120
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert report.score == 0
    assert report.decoded_score < 0


def test_equal_codes_give_equal_files(tmp_path):
    for name in ("a", "b"):
        net, code = coded()
        vd.pack(net, tmp_path / name, method="random_code", code=code)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_double_precision_comes_back(tmp_path):
    torch.manual_seed(0)
    net = vd.convert(nn.Linear(12, 5).double(), GAUSSIAN)
    code = vd.RandomCode(net, bits=160)
    code.close()
    vd.pack(net, tmp_path / "net.vdp", method="random_code", code=code)
    found = vd.unpack(tmp_path / "net.vdp", into=nn.Linear(12, 5).double())
    assert torch.equal(found.weight, net.weight)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    net, code = coded()
    path = tmp_path_factory.mktemp("code") / "net.vdp"
    vd.pack(net, path, method="random_code", code=code)
    return path.read_bytes()


@pytest.mark.parametrize("place", [4, 9, 40, -40, -1])
def test_a_changed_byte_is_refused(tmp_path, raw, place):
    changed = bytearray(raw)
    changed[place] ^= 16
    (tmp_path / "net.vdp").write_bytes(changed)
    with pytest.raises(VardropError, match=r"checksum of .* to match, but got another"):
        vd.unpack(tmp_path / "net.vdp", into=make())


@pytest.mark.parametrize("length", [0, 3, 4, 7, 20, -1, -9])
def test_a_file_that_is_cut_off_is_refused(tmp_path, raw, length):
    (tmp_path / "net.vdp").write_bytes(raw[:length])
    with pytest.raises(VardropError, match=r"Expected (the checksum of )?.*net.vdp"):
        vd.unpack(tmp_path / "net.vdp", into=make())


def test_a_later_format_is_refused(tmp_path, raw):
    (tmp_path / "net.vdp").write_bytes(raw[:3] + b"\x03" + raw[4:])
    with pytest.raises(VardropError, match=r"in format 1 or 2, but got b'VDP\\x03' at its start"):
        vd.unpack(tmp_path / "net.vdp", into=make())


def test_other_readers_and_other_nets_are_told(tmp_path, raw):
    path = tmp_path / "net.vdp"
    path.write_bytes(raw)
    with pytest.raises(VardropError, match="it was packed. Read it with vardrop.unpack"):
        vd.load(path, into=make())
    with pytest.raises(VardropError, match="Expected `into` to have the module '0'"):
        vd.unpack(path, into=nn.Linear(2, 2))


def forged(raw, edit):
    """A file whose header is edited, with a right checksum."""
    (length,) = struct.unpack_from("<I", raw, 4)
    inflater = zlib.decompressobj(-15, zdict=packing._LIKELY)
    header = json.loads(inflater.decompress(raw[8 : 8 + length]))
    content = edit(header)
    if not isinstance(content, bytes):
        content = raw[8 + length : -8]
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=packing._LIKELY)
    packed = deflater.compress(json.dumps(header).encode()) + deflater.flush()
    body = raw[:4] + struct.pack("<I", len(packed)) + packed + content
    return body + hashlib.blake2b(body, digest_size=8).digest()


FORGED = {
    "seed": (lambda h: h.__setitem__(1, -1), "Expected `seed`"),
    "bits": (lambda h: h.__setitem__(2, 40), "Expected `block_bits`"),
    "no bits": (lambda h: h.__setitem__(2, 0), "Expected `bits`"),
    "blocks": (lambda h: h.__setitem__(3, 2**40), "Expected at most one block per weight"),
    "no blocks": (lambda h: h.__setitem__(3, 0), "Expected `the number of blocks`"),
    "fewer blocks": (lambda h: h.__setitem__(3, 7), "bytes after the header, but got"),
    "tapered": (lambda h: h.__setitem__(4, 2), "Expected `tapered`"),
    "level": (lambda h: h[5].__setitem__(0, 1000), r"levels of a random code in -128..127"),
    "level that is none": (lambda h: h[5].__setitem__(0, True), "levels of a random code"),
    "tensors": (lambda h: h[5].pop(), "Expected the file to hold the 11 tensors of `into`"),
    "parts": (lambda h: h.pop(), "Expected the description in"),
    "content": (lambda h: b"x", "bytes after the header, but got 1"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_refused(tmp_path, raw, name):
    edit, message = FORGED[name]
    (tmp_path / "net.vdp").write_bytes(forged(raw, edit))
    with pytest.raises(VardropError, match=message):
        vd.unpack(tmp_path / "net.vdp", into=make())


def plain():
    return make(), None, {}


def open_code():
    net, code = coded()
    code.index[3] = -1
    return net, code, {}


def of_another():
    return coded()[0], coded()[1], {}


CALLS = [
    (plain, "Expected `net` to have noisy modules"),
    (open_code, "Expected all blocks of `code` to be closed, but got 1 open"),
    (of_another, "Expected `code` to be of `net`, but got that of another net"),
    (lambda: (*coded(), {"method": "miracle"}), "Expected `method` to be one of 'entropy', 'rando"),
    (lambda: (*coded(), {"method": "entropy"}), "Expected `net` to be plain"),
    (lambda: (make(), coded()[1], {"method": "entropy"}), 'Expected `code` with method="random_'),
    (lambda: (coded()[0], "code", {}), "Expected `code` to be a vardrop.RandomCode, but got 'code'"),
    (lambda: (*coded(), {"tolerance": 2.0}), "Expected no `tolerance` and no `deviations`"),
    (
        lambda: (vd.convert(make(), vd.sparse_vd()), None, {}),
        r"Expected '0.weight' to have a Normal prior of mean 0 .* but got LogUniform",
    ),
]  # fmt: skip


@pytest.mark.parametrize("given, message", CALLS)
def test_calls_that_cannot_be_right(tmp_path, given, message):
    net, code, options = given()
    with pytest.raises(VardropError, match=message):
        vd.pack(net, tmp_path / "net.vdp", code=code, **{"method": "random_code", **options})
    assert list(tmp_path.iterdir()) == []
