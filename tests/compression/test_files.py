import copy
import hashlib
import json
import os
import pickle
import struct
import zlib
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import vardrop as vd
from tests.compression.nets import NETS, sparsen
from tests.nets import assert_unchanged
from tests.refusals import assert_refused
from tests.running import python
from vardrop._core.files import write_tensors
from vardrop.compression import Select, load, pack, save, shrink, unpack

FORMATS = pytest.mark.parametrize(("write", "read"), [(save, load), (pack, unpack)])


def small_net(name="residual", recipe=False, drop_inputs=False):
    small, _, make, shape = planned_net(name, recipe, drop_inputs)
    return small, make, shape


def planned_net(name, recipe=True, drop_inputs=False):
    make, shape = NETS[name]
    net = sparsen(make(), torch.Generator().manual_seed(0))
    if recipe:
        net = vd.convert(net, vd.sparse_vd(log_sigma2=-9.0)).eval()
    return *shrink(net, torch.zeros(1, *shape), drop_inputs=drop_inputs), make, shape


@pytest.mark.parametrize("drop_inputs", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_saved_net_comes_back(tmp_path, name, drop_inputs):
    small, make, shape = small_net(name, drop_inputs=drop_inputs)
    size = save(small, tmp_path / "net.safetensors")
    assert size == os.path.getsize(tmp_path / "net.safetensors")
    with assert_unchanged(into := make()):
        loaded = load(tmp_path / "net.safetensors", into=into)
    x = torch.randn(3, *shape)
    assert torch.equal(loaded(x), small(x))
    assert not loaded.training


@pytest.mark.parametrize("drop_inputs", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_packed_net_comes_back_rounded(tmp_path, name, drop_inputs):
    small, plan, make, _ = planned_net(name, drop_inputs=drop_inputs)
    report = pack(vd.Shrunk(small, plan), tmp_path / "net.vdp", tolerance=0.5)
    assert report.bytes == os.path.getsize(tmp_path / "net.vdp")
    assert report.dense_bytes == plan.total("bytes")[0]
    loaded = unpack(tmp_path / "net.vdp", into=make())
    for key, tensor in small.state_dict().items():
        found = loaded.state_dict()[key]
        if key in plan.standard_deviations:
            # every weight has the same deviation here, and the step is half of it
            assert (found - tensor).abs().max() <= 0.2501 * torch.exp(torch.tensor(-4.5))
        else:
            assert torch.equal(found, tensor)


def test_pack_reports_bytes_and_bits(tmp_path):
    small, plan, _, _ = planned_net("lenet-300-100")
    report = pack(vd.Shrunk(small, plan), tmp_path / "net.vdp")
    assert "times smaller" in str(report)
    assert report.ratio == report.dense_bytes / report.bytes
    counts = {n: int(p.count_nonzero()) for n, p in small.named_parameters()}
    bits = sum(b * counts[n] for n, b in report.bits_per_weight.items())
    assert 0.5 * report.bytes < bits / 8 < report.bytes


def test_without_a_plan_the_step_is_a_share_of_the_weights(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    net[3].weight.data[:, ::2] = 0
    pack(net, tmp_path / "net.vdp", tolerance=2.0)
    found = unpack(tmp_path / "net.vdp", into=copy.deepcopy(net)).state_dict()
    for name, tensor in net.state_dict().items():
        if tensor.dim() > 1:
            size = tensor[tensor != 0].square().mean().sqrt()
            assert 0.4 * size / 16 < (found[name] - tensor).abs().max() <= 0.501 * size / 16
            assert not found[name][tensor == 0].any()
        else:
            assert torch.equal(found[name], tensor)


def test_coarser_steps_take_fewer_bytes(tmp_path):
    small, plan, _, _ = planned_net("lenet-300-100")
    shrunk, path = vd.Shrunk(small, plan), tmp_path / "net.vdp"
    sizes = [pack(shrunk, path, tolerance=t).bytes for t in (0.25, 1.0, 4.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.3 * sizes[-1]


@FORMATS
def test_a_net_that_was_shrunk_twice_comes_back(tmp_path, write, read):
    def fresh():
        return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    small, x = fresh(), torch.randn(4, 8)
    for dead in (slice(0, 2), slice(2, 3)):  # inputs that go; the second time of those left
        noisy = vd.convert(small, vd.sparse_vd(log_sigma2=-20.0))
        with torch.no_grad():
            first = next(m for m in noisy.modules() if isinstance(m, nn.Linear))
            first.log_sigma2[:, dead] = 20.0
        small, plan = shrink(noisy, x[:1], drop_inputs=True)
    if write is save:
        save(small, tmp_path / "net")
    else:
        pack(vd.Shrunk(small, plan), tmp_path / "net", tolerance=0.01)
    again = read(tmp_path / "net", into=fresh())
    assert [len(m.index) for m in again.modules() if isinstance(m, Select)] == [6, 5]
    assert torch.allclose(again(x), small(x), atol=1e-5)


def test_fresh_process_reads_the_files(tmp_path):
    small, _, _ = small_net("lenet-300-100", recipe=True, drop_inputs=True)
    save(small, tmp_path / "saved")
    pack(small, tmp_path / "packed", tolerance=0.01)
    code = f"""if True:
        import torch
        from torch import nn
        from vardrop.compression import load, unpack
        dense = nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
        x = torch.linspace(-1, 1, 2 * 784).view(2, 1, 28, 28)
        for name, read in (("saved", load), ("packed", unpack)):
            net = read({str(tmp_path)!r} + "/" + name, into=nn.Sequential(nn.Flatten(), *dense))
            print(net(x).flatten().tolist())
    """
    lines = python("-c", code, check=True).stdout.splitlines()
    expected = small(torch.linspace(-1, 1, 2 * 784).view(2, 1, 28, 28))
    for line, tolerance in zip(lines, (1e-6, 1e-2), strict=True):
        assert torch.allclose(torch.tensor(eval(line)).view(2, 10), expected, atol=tolerance)


class Bomb:
    """Pickle would create the file; nothing may unpickle it."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@FORMATS
def test_malicious_pickle_is_refused(tmp_path, write, read):
    path, target = tmp_path / "net", tmp_path / "owned"
    refused = r"Expected .* to be (a safetensors file|written by)"
    path.write_bytes(pickle.dumps(Bomb(target)))
    assert_refused(refused, read, path, into=nn.Linear(2, 1))
    torch.save({"weight": Bomb(target)}, path)
    assert_refused(refused, read, path, into=nn.Linear(2, 1))
    assert not target.exists()


@FORMATS
def test_wrong_nets_and_missing_files_are_named(tmp_path, write, read):
    small, _, _ = small_net("residual", recipe=True)
    path = tmp_path / "net"
    write(small, path)
    other = nn.Sequential(nn.Linear(2, 2))
    assert_refused("Expected `into` to have the module 'stem'", read, path, into=other)
    assert_refused("not there|not found", read, tmp_path / "absent", into=small)
    narrow = NETS["residual"][0]()
    narrow.stem = nn.Conv2d(3, 2, 3)
    assert_refused("Expected a size of 'stem' to be an integer from 1", read, path, into=narrow)
    noisy = vd.convert(NETS["residual"][0](), vd.sparse_vd())
    assert_refused("to be a plain torch layer, but got Conv2d", read, path, into=noisy)


def test_forged_plan_with_a_right_checksum_is_refused(tmp_path):
    net, path = nn.Linear(2, 1), tmp_path / "net.safetensors"
    empty = {"sizes": {}, "select": {}, "scale": {}, "identity": []}
    forged = [
        {"sizes": {"": [-1, 1, 1]}}, {"sizes": {"": ["x"]}}, {"select": {"": [1e12, 0]}},
    ]  # fmt: skip
    for plan in ({}, [], *({**empty, **entry} for entry in forged)):
        content = {**plan, "format": "vardrop net 1"} if isinstance(plan, dict) else plan
        write_tensors(path, net.state_dict(), content)
        refused = "Expected (a valid description|a size of|.* to be written by vardrop.save)"
        assert_refused(refused, load, path, into=net)


def test_foreign_safetensors_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1, 2)}, tmp_path / "net.safetensors")
    assert_refused("damaged, or vardrop", load, tmp_path / "net.safetensors", into=nn.Linear(2, 1))
    vd.save_noisy(vd.convert(nn.Linear(2, 1), vd.sparse_vd()), tmp_path / "net.safetensors")
    assert_refused("vardrop.load_noisy", load, tmp_path / "net.safetensors", into=nn.Linear(2, 1))


def test_a_dead_net_keeps_its_biases(tmp_path):
    net, x = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3)), torch.randn(2, 20)
    dead = shrink(vd.convert(copy.deepcopy(net), vd.sparse_vd(10.0)), torch.zeros(1, 20))
    pack(dead, tmp_path / "dead.vdp")
    assert torch.equal(unpack(tmp_path / "dead.vdp", into=net)(x), dead.net(x))


@FORMATS
@pytest.mark.parametrize("key", ["weight_ih_l0", "weight_hh_l0"])
def test_weights_that_were_pruned_by_torch_come_back(tmp_path, write, read, key):
    """`prune.remove` registers a weight again, behind the biases."""

    def make():
        return nn.ModuleDict({"rnn": nn.GRU(3, 4), "last": nn.Linear(4, 2)})

    net = make()
    for layer, name in ((net["rnn"], key), (net["last"], "weight")):
        prune.l1_unstructured(layer, name, 0.5)
        prune.remove(layer, name)
    write(net, tmp_path / "net")
    back = read(tmp_path / "net", into=make()).state_dict()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0 if write is save else 0.01)
        assert not back[name][tensor == 0].any()


def test_buffers_of_every_type_come_back(tmp_path):
    net = nn.Linear(3, 2)
    net.register_buffer("mask", torch.arange(7) % 3 == 0)
    net.register_buffer("bytes", torch.tensor([3, 255, 0, 128], dtype=torch.uint8))
    net.register_buffer("waves", torch.tensor([1 + 2j, -3j]))
    net.register_buffer("short", torch.tensor([0.1, 7.0], dtype=torch.float16))
    pack(net, tmp_path / "net.vdp", standard_deviations={"weight": torch.full((2, 3), 0.01)})
    into = copy.deepcopy(net)
    for buffer in into.buffers():
        buffer.zero_()
    found = unpack(tmp_path / "net.vdp", into=into).state_dict()
    for name, tensor in net.state_dict().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor) or name == "weight"


def test_pack_compares_before_it_writes(tmp_path, monkeypatch):
    module = import_module("vardrop.compression.pack")

    decode = module._decode

    def decode_wrongly(*args):
        return {name: tensor.flip(0) for name, tensor in decode(*args).items()}

    monkeypatch.setattr(module, "_decode", decode_wrongly)
    small, _, _ = small_net("lenet-300-100", recipe=True)
    assert_refused("same after decoding.*Nothing was written", pack, small, tmp_path / "net.vdp")
    assert not list(tmp_path.iterdir())


def test_equal_nets_give_equal_bytes(tmp_path):
    small, _, _ = small_net()
    for i in range(8):
        save(small, tmp_path / str(i))
    assert len({(tmp_path / str(i)).read_bytes() for i in range(8)}) == 1


def test_verbs_name_each_other(tmp_path):
    small, make, _ = small_net("lenet-300-100", recipe=True)
    pack(small, tmp_path / "net.vdp")
    save(small, tmp_path / "net.safetensors")
    assert_refused("Read it with vardrop.unpack", load, tmp_path / "net.vdp", into=make())
    refused = "Read files of vardrop.save with vardrop.load"
    assert_refused(refused, unpack, tmp_path / "net.safetensors", into=make())


@pytest.mark.parametrize("recipe", [vd.sparse_vd(), vd.beta_bernoulli()])
def test_file_of_a_noisy_net_says_convert(tmp_path, recipe):
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    net = vd.convert(make(), recipe)
    save(net, tmp_path / "net.safetensors")
    refused = r"contains a noisy model.*call vardrop.convert\(into, recipe"
    assert_refused(refused, load, tmp_path / "net.safetensors", into=make())
    again = load(tmp_path / "net.safetensors", into=vd.convert(make(), recipe))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))


def signed(header, content):
    """A packed file with this header and a right checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    packed = zlib.compress(text, 9)
    body = b"VDP\x01" + struct.pack("<I", len(packed)) + packed + content
    return body + hashlib.blake2b(body, digest_size=16).digest()


def edited(*keys, value):
    def edit(header):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return edit


BOMBS = {
    "select": edited(0, "select", value={"1": [2**26, -1]}),
    "scale": edited(0, "scale", value={"2": [2**26, -1]}),
    "select of no layer": edited(0, "select", value={"2": [2**26, -1]}),
    "groups": edited(0, "sizes", "stem", value=[64, 64, 1, 1]),
    "one count": edited(1, 0, 2, value=[2**40]),
    "counts that cancel": edited(1, 0, 2, value=[2**40, 300 * 784 - 2**40]),
    "counts of zero": edited(1, 0, slice(1, 3), value=[[0] * 10**6, [0] * 10**6]),
    "values without counts": edited(1, 0, 1, value=[0] * 10**6),
    "step": edited(1, 0, 0, value=-1.0),
    "step that is no number": edited(1, 0, 0, value="x"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_forged_file_cannot_ask_for_memory(tmp_path, name):
    def grouped():
        net = NETS["lenet-300-100"][0]()
        net.stem = nn.Conv2d(64, 64, 33, groups=64)
        return net

    net = grouped()
    deviations = {"1.weight": torch.ones_like(net[1].weight)}
    net[1].weight.data.mul_(30)
    pack(net, tmp_path / "net.vdp", standard_deviations=deviations)
    raw = (tmp_path / "net.vdp").read_bytes()
    (length,) = struct.unpack_from("<I", raw, 4)
    header = json.loads(zlib.decompress(raw[8 : 8 + length]))
    BOMBS[name](header)
    (tmp_path / "net.vdp").write_bytes(signed(header, raw[8 + length : -16]))
    into = grouped()
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        assert_refused("Expected", unpack, tmp_path / "net.vdp", into=into)
    allocated = max((e.self_cpu_memory_usage for e in profile.events()), default=0)
    assert allocated <= 2 * max(t.nbytes for t in into.state_dict().values())


def test_header_that_inflates_is_refused(tmp_path):
    path = tmp_path / "net.vdp"
    path.write_bytes(signed(b"[" + b"0," * 10**7 + b"0]", b""))
    assert_refused("Expected a header of at most", unpack, path, into=nn.Linear(2, 1))
