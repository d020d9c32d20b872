import warnings

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import NETS, sparsen
from tests.nets import Parts
from vardrop.compression import shrink
from vardrop.export import export_onnx, export_program

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    onnxruntime = pytest.importorskip("onnxruntime")


def run(path, *tensors):
    session = onnxruntime.InferenceSession(path)
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def shrunken(name):
    make, shape = NETS[name]
    net = sparsen(make(), torch.Generator().manual_seed(0))
    return shrink(net, torch.zeros(1, *shape), drop_inputs=True).net, shape


@pytest.mark.parametrize(
    "name", [n if n == "residual" else pytest.param(n, marks=pytest.mark.slow) for n in NETS]
)
def test_onnx_equals_torch(tmp_path, name):
    small, shape = shrunken(name)
    size = export_onnx(small, torch.zeros(1, *shape), tmp_path / "net.onnx")
    assert size == (tmp_path / "net.onnx").stat().st_size
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        assert torch.allclose(run(tmp_path / "net.onnx", x), small(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_program_equals_the_net_at_any_batch(name):
    small, shape = shrunken(name)
    program = export_program(small, torch.zeros(1, *shape))
    for batch in (2, 7):
        x = torch.randn(batch, *shape)
        assert torch.allclose(program.module()(x), small(x), atol=1e-6)


class Attention(nn.Module):
    """Self-attention that asks for the length of its batch."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_batch_size_of_the_example_is_not_fixed(tmp_path, rows):
    net = Attention().eval()
    export_onnx(net, torch.randn(rows, 5, 4), tmp_path / "net.onnx")
    for batch in (1, 2, 3, 7):
        x = torch.randn(batch, 5, 4)
        found = run(tmp_path / "net.onnx", x)
        torch.testing.assert_close(found, net(x).detach(), rtol=0, atol=1e-5)


def test_onnxruntime_quantises_the_file(tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4)).eval()
    size, x = export_onnx(net, torch.zeros(1, 16), tmp_path / "net.onnx"), torch.randn(5, 16)
    quantization.quantize_dynamic(tmp_path / "net.onnx", tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * size
    assert (run(tmp_path / "int8.onnx", x) - net(x)).abs().max() < 0.05 * net(x).abs().max()


def noisy_net():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    return vd.convert(net, vd.sparse_vd(log_sigma2=-2.0)).eval()


@pytest.mark.slow
def test_a_graph_of_draws_takes_its_noise(tmp_path):
    predictor, x = vd.freeze(noisy_net(), 3), torch.randn(5, 1, 4, 4)
    export_onnx(predictor, x[:1], tmp_path / "net.onnx", outputs=["draws"], noise="input")
    graph = predictor.graph(x, ["draws"], "input")
    noise = graph.noise_like(x)
    assert noise.shape == (3, 5, 2 * 4 + 3)
    assert torch.allclose(run(tmp_path / "net.onnx", x, noise), graph(x, noise)[0], atol=1e-5)


def test_inputs_of_a_graph_with_draws_have_names(tmp_path):
    class Two(Parts):
        def forward(self, x, context):
            return self.a(x) + self.b(context)

    net = vd.convert(Two(None, a=nn.Linear(4, 3), b=nn.Linear(2, 3)), vd.sparse_vd()).eval()
    example = (torch.zeros(1, 4), torch.zeros(1, 2))
    export_onnx(vd.freeze(net, 2), example, tmp_path / "net.onnx", noise="input")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert [i.name for i in session.get_inputs()] == ["x", "context", "noise"]
    assert not [p for p in tmp_path.iterdir() if p.name != "net.onnx"]


def test_draws_are_those_of_the_layers():
    net, x, noise = noisy_net(), torch.randn(5, 1, 4, 4), torch.randn(2, 5, 11)
    (found,) = vd.freeze(net, 2).graph(x, ["draws"], "input")(x, noise)
    for s in range(2):
        hidden = net[0](x, noise=noise[s, :, :8].view(5, 2, 2, 2)).relu()
        expected = net[3](hidden.flatten(1), noise=noise[s, :, 8:])
        assert torch.allclose(found[s], expected, atol=1e-6)
    assert not torch.allclose(found[0], found[1])
