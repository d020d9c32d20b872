"""The switch and the clone: what a call changes is its own, in every thread and order."""

from __future__ import annotations

import functools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from vardrop._core.modules import clone_modules
from vardrop._core.sharding import forward_method, is_model_sharded
from vardrop.gates import find_unswitched_dropout


def net() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return vd.convert(layers, vd.bayes_by_backprop(log_sigma2=-2.0)).eval()


def flags(module: nn.Module) -> list[object]:
    return [m.sampling for m in module.modules() if isinstance(m, vd.noisy.Noisy)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_order_of_leaving_does_not_matter(order: tuple[int, int]) -> None:
    model, x = net(), torch.ones(1, 4)
    open_now = [vd.sampling(model), vd.sampling(model, on=False)]
    for one in open_now:
        one.__enter__()
    assert flags(model) == [False, False]
    open_now[order[0]].__exit__(None, None, None)
    assert flags(model) == ([False, False] if order[0] == 0 else [True, True])
    open_now[order[1]].__exit__(None, None, None)
    assert flags(model) == [None, None]
    assert torch.equal(model(x), model(x))
    assert not any("_switches" in vars(m) for m in model.modules())


def test_a_flag_that_was_set_by_hand_comes_back() -> None:
    model = net()
    model[0].sampling = False
    with vd.sampling(model), vd.sampling(model[2], on=False):
        assert flags(model) == [True, False]
    assert flags(model) == [False, None]


def test_an_error_inside_restores_the_flags() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="inside"), vd.sampling(model):
        raise RuntimeError("inside")
    assert flags(model) == [None, None]


def test_a_second_thread_is_refused_while_one_is_inside() -> None:
    model = net()

    def other() -> None:
        with vd.sampling(model):
            assert flags(model) == [True, True]

    with vd.sampling(model), ThreadPoolExecutor() as threads:
        told = str(threads.submit(other).exception())
        assert flags(model) == [True, True]
    assert told.startswith("Expected `sampling(net)` from one thread at a time, but got")
    assert flags(model) == [None, None]
    with ThreadPoolExecutor() as threads:
        threads.submit(other).result()


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()


def test_an_encoder_layer_with_a_gate_keeps_the_means_of_the_gate_without_gradients() -> None:
    layer = vd.convert(encoder(), vd.Recipe(gate=vd.LogNormal(mu=-1.0)), include="linear2")
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        quiet = layer(x)
    torch.testing.assert_close(quiet, layer(x).detach())


def test_encoder_layers_leave_torchs_fused_path_only_while_they_are_noisy() -> None:
    layer, x = encoder(), torch.randn(2, 3, 8)
    assert layer.activation_relu_or_gelu == 1
    vd.convert(layer, vd.sparse_vd(), include="linear*")
    assert layer.activation_relu_or_gelu == 0
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), vd.sampling(layer):
        assert not torch.equal(layer(x), layer(x))
        assert torch.backends.mha.get_fastpath_enabled()
    vd.revert(layer)
    assert layer.activation_relu_or_gelu == 1


def test_a_stack_of_encoder_layers_makes_no_nested_tensor_while_it_is_noisy() -> None:
    stack = nn.TransformerEncoder(encoder(), 2).eval()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, True]] * 2)
    assert stack.use_nested_tensor
    vd.convert(stack, vd.sparse_vd(), include="*linear*")
    with torch.no_grad(), vd.sampling(stack):
        assert not torch.equal(*[stack(x, src_key_padding_mask=mask) for _ in range(2)])
    vd.revert(stack)
    assert stack.use_nested_tensor


class Holding(nn.Module):
    """Modules in every place where a forward may find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.again, self.listed = self.layer, [self.layer, (self.tied, {"key": self.layer})]
        self.bound = self.layer.forward
        self.part, self.plain = functools.partial(self.apply_to, self.tied), [1, 2]
        self.parent = [self]
        object.__setattr__(self, "hidden", self.layer)
        self.register_buffer("offset", torch.zeros(3))

    @staticmethod
    def apply_to(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.listed[1][1]["key"](x)) + self.offset


def test_a_clone_has_new_modules_and_the_same_tensors() -> None:
    source = Holding()
    twin = clone_modules(source)
    assert torch.equal(twin(torch.ones(1, 3)), source(torch.ones(1, 3)))
    assert not set(twin.modules()) & set(source.modules())
    for name, tensor in source.state_dict(keep_vars=True).items():
        assert twin.state_dict(keep_vars=True)[name] is tensor
    layer = twin.layer
    assert twin.again is twin.hidden is twin.listed[0] is twin.listed[1][1]["key"] is layer
    assert twin.listed[1][0] is twin.part.args[0] is twin.tied
    assert twin.bound.__self__ is layer
    assert twin.parent[0] is twin
    assert twin.plain is source.plain  # what holds no module is shared


def test_a_clone_is_changed_without_the_source() -> None:
    source = net().train()
    before, twin = set(source.state_dict()), clone_modules(source)
    twin.eval()[0].sampling = True
    twin[0].register_forward_hook(lambda *_: None)
    twin[0].register_buffer("more", torch.zeros(1))
    twin[1] = nn.Tanh()
    assert all(m.training for m in source.modules())
    assert source[0].sampling is None
    assert not source[0]._forward_hooks
    assert type(source[1]) is nn.ReLU
    assert set(source.state_dict()) == before


def test_a_clone_starts_without_what_belongs_to_another_call() -> None:
    model = net()
    with vd.sampling(model):
        twin = clone_modules(model)
    assert not any("_switches" in vars(m) for m in twin.modules())


def test_models_are_cloned_and_checked_while_another_thread_switches_the_noise(request) -> None:
    layers = [nn.Linear(4, 4) for _ in range(20)]
    model, stop = vd.convert(nn.Sequential(*layers), vd.sparse_vd()), threading.Event()

    def switch() -> None:
        while not stop.is_set():
            with vd.sampling(model):
                pass

    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor() as threads:
        switching = threads.submit(switch)
        try:
            clones = [clone_modules(model) for _ in range(200)]
            for _ in range(500):
                find_unswitched_dropout(model, torch.zeros(1, 4))
        finally:
            stop.set()
        switching.result()
    assert not any("_switches" in vars(m) for clone in clones for m in clone.modules())


def test_a_half_imported_module_of_another_thread_is_no_error(monkeypatch) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model = net()
    assert not is_model_sharded(model)
    assert forward_method(model, "forward") == model.forward
    assert torch.equal(clone_modules(model)(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_modules_can_be_replaced_wherever_they_occur() -> None:
    source, other = Holding(), nn.Identity()
    twin = clone_modules(source, {source.layer: other})
    assert twin.layer is twin.again is twin.listed[0] is twin.hidden is other
    assert source.layer is source.again


def test_wrappers_are_left_off() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(inner, backend="eager")
    assert type(clone_modules(compiled)) is nn.Sequential
    assert clone_modules(nn.Sequential(compiled))[0][0].weight is inner[0].weight
    inner.compile(backend="eager")
    assert clone_modules(inner)._compiled_call_impl is None
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert torch.equal(clone_modules(traced)(torch.ones(1, 2)), traced(torch.ones(1, 2)))
