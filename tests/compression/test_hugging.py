"""Models of transformers lose heads and feed-forward units by the same rules as any net."""

import time

import pytest
import torch
from transformers import BatchEncoding

import vardrop as vd
from tests.integrations.models import make

WIDTH, HEADS, SIZE, FORWARD = 32, 4, 8, 48  # of a model, its heads, one head and the units after


def tokens():
    return torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))


INPUTS = {
    "bert": tokens, "distilbert": tokens, "llama": tokens, "gpt2": tokens,
    "vit": lambda: torch.randn(2, 3, 16, 16),
    "t5": lambda: (tokens(), torch.ones(2, 6, dtype=torch.long), tokens()[:, :4]),
}  # fmt: skip
OUTPUTS = ("attention.output.dense", ".out_lin", ".o_proj", "Attention.o", ".attn.c_proj")
DOWN = (".output.dense", ".lin2", ".down_proj", ".fc2", ".wo", ".mlp.c_proj")


@torch.no_grad()
def kill(net, heads=(0, 1)):
    """Zero what reads some heads and every second feed-forward unit."""
    for name, module in net.named_modules():
        if name.endswith((*OUTPUTS, *DOWN)):
            weight = module.weight.t() if name.endswith("c_proj") else module.weight
            size = weight.shape[1] // HEADS
            if name.endswith(OUTPUTS):
                for head in heads:
                    weight[:, head * size : (head + 1) * size] = 0
            else:
                weight[:, ::2] = 0


def call(net, inputs):
    with torch.no_grad():
        return net(*(inputs if isinstance(inputs, tuple) else (inputs,))).logits


@pytest.mark.parametrize("model", INPUTS)
def test_models_lose_heads_and_units_and_are_read_again(model, tmp_path):
    net, inputs = make(model).eval(), INPUTS[model]()
    kill(net)
    small, plan = vd.shrink(net, inputs)
    for layer in plan.layers:
        if layer.name.endswith((*OUTPUTS, *DOWN)):
            assert layer.after.inputs == layer.before.inputs // 2
            assert layer.after.outputs == layer.before.outputs
    assert "Equal on the example and on 5 random inputs" in plan.proof
    vd.save(small, tmp_path / "small.safetensors")
    again = vd.load(tmp_path / "small.safetensors", into=make(model))
    torch.testing.assert_close(call(again, inputs), call(net, inputs))


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_models_that_select_the_inputs_of_layers_are_read_again(model, tmp_path):
    net, inputs = make(model).eval(), INPUTS[model]()
    kill(net)
    for name, module in net.named_modules():
        if name.endswith(("c_proj", "Attention.o")):
            (module.weight if name.endswith("c_proj") else module.weight.t()).data[-3:] = 0
    small = vd.shrink(net, inputs, drop_inputs=True).net
    assert any(isinstance(m, vd.compression.Select) for m in small.modules())
    vd.save(small, tmp_path / "net")
    again = vd.load(tmp_path / "net", into=make(model))
    torch.testing.assert_close(call(again, inputs), call(net, inputs))


def test_named_arguments_are_an_example(tmp_path):
    net = make("bert").eval()
    kill(net)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    batch = BatchEncoding({"input_ids": tokens(), "attention_mask": mask})
    small = vd.shrink(net, batch).net
    assert small.bert.encoder.layer[1].attention.self.query.out_features == WIDTH // 2
    torch.testing.assert_close(small(**batch).logits, net(**batch).logits)
    program = vd.export_program(small, batch)
    other = {name: value[:1].repeat(3, 1) for name, value in batch.items()}
    torch.testing.assert_close(program.module()(**other).logits, small(**other).logits)


@pytest.mark.filterwarnings("ignore:The accuracy on validation data went from")
def test_a_model_is_slimmed_on_named_batches_by_one_gate_per_head():
    x, y = torch.randint(1, 50, (48, 6)), torch.randint(2, (48,))
    batches = [({"input_ids": x[i : i + 16]}, y[i : i + 16]) for i in (0, 16, 32)]
    given = {"macs": 0.5, "epochs": 8, "runtimes": ["torch"]}
    small = vd.slim(make("bert").eval(), batches[:2], batches[2:], **given)
    assert small.left("macs") <= 0.5
    widths = [layer.attention.self.key.out_features for layer in small.net.bert.encoder.layer]
    assert all(width % SIZE == 0 for width in widths)
    assert sum(widths) < 2 * WIDTH


def test_a_noisy_model_loses_what_its_gates_close():
    net = vd.convert(make("bert"), vd.l0(), include="*.output.dense")
    for gate in (m for m in net.modules() if isinstance(m, vd.Gate)):
        gate.logit.data.fill_(5.0)
        gate.logit.data[SIZE : 2 * SIZE] = -20.0
    small = vd.shrink(net, tokens()).net.bert.encoder.layer[0]
    assert small.attention.self.value.out_features == WIDTH - SIZE
    assert small.intermediate.dense.out_features == FORWARD - SIZE


def test_heads_that_a_shared_bias_of_positions_ties_go_together_or_stay():
    net, inputs = make("t5").eval(), INPUTS["t5"]()
    net.encoder.block[0].layer[0].SelfAttention.o.weight.data[:, :SIZE] = 0
    assert vd.shrink(net, inputs).net.encoder.block[0].layer[0].SelfAttention.n_heads == HEADS
    net.encoder.block[1].layer[0].SelfAttention.o.weight.data[:, :SIZE] = 0
    small = vd.shrink(net, inputs).net
    assert small.encoder.block[0].layer[0].SelfAttention.n_heads == HEADS - 1
    assert small.decoder.block[0].layer[0].SelfAttention.n_heads == HEADS


def test_query_heads_that_share_a_dead_key_go_with_it_and_others_stay():
    net = make("llama").eval()
    kill(net, heads=(0, 3))  # one of each pair: their keys are read by the other
    assert vd.shrink(net, tokens()).net.model.layers[0].self_attn.q_proj.out_features == WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("model, layers, units", [("bert", 6, 1024), ("llama", 12, 688)])
def test_large_models_are_shrunk_in_half_a_minute(model, layers, units):
    sizes = {"num_hidden_layers": layers, "hidden_size": 256, "intermediate_size": units}
    net = make(model, **sizes).eval()
    kill(net)
    start = time.process_time()  # of one thread, whatever else runs
    plan = vd.shrink(net, tokens()).plan
    assert time.process_time() - start <= 30
    assert plan.total("macs")[1] < 0.6 * plan.total("macs")[0]
    assert "Equal on the example and on 5 random inputs" in plan.proof
