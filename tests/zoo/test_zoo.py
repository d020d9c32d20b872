"""Every model of the zoo works with every verb, or the verb names the reason."""

import pytest
import torch

import vardrop as vd
from tests.refusals import assert_refused
from tests.zoo.checks import convert, elbo, kill_by_noise, mc_dropout, onnx, predict, shrink
from tests.zoo.models import ZOO

# Shares of the weights that are noisy, if not nearly all: experts and convolutions of other classes.
PLAIN_WEIGHTS = {"qwen3_moe": 0.3, "bart": 0.8, "wav2vec2": 0.8}
# Models that lose no unit: the code of Mamba and of experts reads weights without calling a layer.
WHOLE = {"mamba", "qwen3_moe"}
REFUSED = {
    "packed lstm": "exportable", "graph network": "exportable|ONNX has",
    "graph network, own layers": "exportable|ONNX has", "qwen3_moe": "exportable|ONNX has",
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_models_convert_predict_and_draw_their_dropout(name):
    entry = ZOO[name]
    assert convert(entry) > PLAIN_WEIGHTS.get(name, 0.87)
    predict(entry)
    mc_dropout(entry)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_models_train(name):
    elbo(ZOO[name])


@pytest.mark.parametrize(
    "name", [n if n == "resnet" else pytest.param(n, marks=pytest.mark.slow) for n in ZOO]
)
def test_models_shrink(name):
    assert (shrink(ZOO[name]) > 0) == (name not in WHOLE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own encoder
@pytest.mark.parametrize("name", ZOO)
def test_models_shrink_where_noise_prunes(name):
    shrink(ZOO[name], kill_by_noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_models_are_exported_with_uncertainty(name):
    if name in REFUSED:
        assert_refused(REFUSED[name], onnx, ZOO[name])
    else:
        onnx(ZOO[name])


def test_a_graph_is_one_input():
    entry = ZOO["graph network"]
    elbo(entry)
    net, graph = vd.convert(entry.build(), vd.bayes_by_backprop()).eval(), entry.batch(6)
    assert_refused("one number of examples, but got 2 and 6", vd.predict, net, graph, samples=2)
    arguments = graph["x"], graph["edge_index"]
    frozen = vd.freeze(net, samples=4, batched=False)
    for x in (graph, arguments):
        p = vd.predict(net, x, samples=4, seed=0, batched=False)
        assert torch.equal(p.probs, frozen(graph, seed=0).probs)


def test_a_decoder_is_exported_without_its_cache(tmp_path):
    entry = ZOO["qwen3"]
    net, batch = entry.build(), entry.batch(2)
    assert net.config.use_cache
    program = vd.export_program(net, batch)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(**batch).logits, net(**batch).logits)
    assert net.config.use_cache


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_layers_are_named():
    from torch.ao.nn.quantized.dynamic import Linear

    with pytest.raises(vd.VardropError, match="its layers are quantised; convert the model before"):
        vd.convert(torch.nn.Sequential(Linear(4, 2)), vd.sparse_vd())
