"""Models of transformers: their `Conv1D` as a noisy layer, and checkpoints of noisy models.

This file is an entry point of the package. It is loaded when a model has modules of transformers.
The Trainer is in `trainer.py`.
"""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional
from vardrop._core.values import Json

import_optional("transformers", "huggingface")

import hashlib
import os
import sys
from abc import ABC
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, pytorch_utils
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.utils.hub import cached_file

from vardrop._core.checks import check_type
from vardrop._core.files import read_tensors, write_tensors
from vardrop._core.integrations import package_of, register_input_check, register_positions
from vardrop.compression.layer_views import AffineLayout, register_affine, register_sizes
from vardrop.conversion import contents, is_description, noise_names, restore
from vardrop.gates import register_functional_dropout
from vardrop.layers import Variational, register_layer
from vardrop.noisy import noisy_modules
from vardrop.posteriors import Axes

NOISE = "noise.safetensors"  # next to the weights
# The files with the means: of a model, of an adapter, and of several adapters.
_WEIGHTS = ("model*.safetensors", "adapter_model.*", "*/adapter_model.*")
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class Conv1D(Variational, pytorch_utils.Conv1D):
    """`Conv1D` of transformers, the dense layer of GPT-2, with a posterior on its weight.

    y = x w + b, w ~ q of shape (inputs, outputs). Input (*, inputs), output (*, outputs).

    Args:
        nf: the number of outputs.
        nx: the number of inputs.

    >>> import torch, vardrop as vd
    >>> from transformers.pytorch_utils import Conv1D
    >>> layer = vd.convert(Conv1D(3, 4), vd.sparse_vd())
    >>> layer(torch.zeros(2, 5, 4)).shape, tuple(vd.log_alpha(layer)[""].shape)
    (torch.Size([2, 5, 3]), (4, 3))
    """

    axes: ClassVar[Axes] = Axes(input=(0,), output=(1,))
    sizes: ClassVar[tuple[str, str]] = ("nx", "nf")

    @property
    def op(self) -> Callable[..., Tensor] | None:
        return _product

    def forward(self, x: Tensor, noise: Any = None) -> Tensor:
        """The noisy output while sampling or with explicit noise, else the plain output."""
        x = self.apply_gate("input", x)
        rows = x.unsqueeze(0) if x.dim() == 1 else x
        y = self.product(_product, (rows,), noise)
        return self.apply_gate("output", y.squeeze(0) if x.dim() == 1 else y)

    def _reset_means(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


register_layer(pytorch_utils.Conv1D, Conv1D)
register_affine(pytorch_utils.Conv1D, AffineLayout(Conv1D.sizes, transposed=True))


def _num_outputs(layer: nn.Module, size: str = "out_features") -> int:
    """The outputs of a layer, which may have a `Select` before it."""
    return int(getattr(layer[-1] if isinstance(layer, nn.Sequential) else layer, size))


def _attention_width(module: GPT2Attention) -> int:
    """The width of the values. One layer computes them with the keys, and mostly the queries."""
    return _num_outputs(module.c_attn, "nf") // (2 if module.is_cross_attention else 3)


register_sizes(
    GPT2Attention,
    split_size=_attention_width,
    num_heads=lambda module: _attention_width(module) // module.head_dim,
)
register_sizes(
    T5Attention,
    inner_dim=lambda module: _num_outputs(module.v),
    n_heads=lambda module: _num_outputs(module.v) // module.key_value_proj_dim,
)


def _has_cache(net: nn.Module) -> bool:
    is_script = isinstance(net, torch.jit.ScriptModule)
    return not is_script and "past_key_values" in signature(net.forward).parameters


def _span(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, int | None]:
    """The position after the cache of keys and values, and the end if few logits are requested."""
    past = kwargs.get("past_key_values")
    start = int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0
    tokens = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    length = next((t.shape[1] for t in tokens if isinstance(t, Tensor)), 0)
    return start, start + length if kwargs.get("logits_to_keep") else None


def _check_mask(name: str, mask: Tensor) -> None:
    """Raise if a mask hides a complete sequence. Only a mask on a CPU is read."""
    if mask.dim() == 2 and mask.device.type == "cpu" and not bool(mask.any(1).all()):
        raise VardropError(
            f"Expected `{name}` to leave a token in every row, but got one that hides all of "
            f"row {int(mask.any(1).logical_not().nonzero()[0])}. Leave out empty sequences."
        )


register_positions(_has_cache, _span)
for _name in ("attention_mask", "decoder_attention_mask", "encoder_attention_mask"):
    register_input_check(_name, _check_mask)


class _Transformers(ABC):  # noqa: B024 - for isinstance checks only
    """Every class of transformers. By convention their training mode decides about noise only."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return package_of(getattr(kind, "plain", kind)) in ("transformers", "transformers_modules")


def _dropout_rates(module: Any) -> dict[str, float]:
    """The rates of a module: attributes with `drop` in the name, and rates of other objects.

    Attention reads the rate of a dropout module instead of calling it. Encoders that may leave out
    layers read the rate from their `config`.
    """
    rates = {name: v for name, v in vars(module).items() if "drop" in name and type(v) is float}
    children = module._modules
    projects = any(isinstance(c, nn.Linear | pytorch_utils.Conv1D) for c in children.values())
    if projects and "Attention" in type(module).__name__:
        names = (name for name in _ATTENTION_DROPOUT if isinstance(children.get(name), nn.Dropout))
        rates |= {f"{name}.p": module.get_submodule(name).p for name in names}
    if "layers" in children and hasattr(getattr(module, "config", None), "layerdrop"):
        rates["config.layerdrop"] = module.config.layerdrop
    return rates


_ATTENTION_DROPOUT = ("dropout", "attn_dropout", "attention_dropout")
register_functional_dropout(_Transformers, _dropout_rates)


def save_pretrained(model: Any, path: str | os.PathLike[str], **options: object) -> None:
    """Write a noisy model as a checkpoint of transformers or PEFT, with its noise in another file.

    The weights are the posterior means, so `from_pretrained` of the model class loads the plain
    model from the same directory. `noise.safetensors` has the recipe of every noisy module and the
    tensors of posteriors, priors and gates. For a PEFT model only the adapter is written.

    Args:
        model: a model of transformers, or a PEFT model, with noisy modules. It is left unchanged.
        path: the directory.
        options: for `model.save_pretrained`.

    >>> import tempfile, vardrop as vd
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from vardrop.integrations.huggingface import from_pretrained, save_pretrained
    >>> size = dict(vocab_size=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    >>> model = vd.convert(GPT2LMHeadModel(GPT2Config(**size)), vd.sparse_vd())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     again = from_pretrained(GPT2LMHeadModel, folder)
    >>> bool(vd.kl(again) == vd.kl(model)), again.lm_head.posterior == model.lm_head.posterior
    (True, True)
    """
    if not is_adapted(model):
        what = "a model of transformers or PEFT"
        check_type("model", model, PreTrainedModel, what, "Save others with vardrop.save_noisy.")
    noisy_modules(model)  # raises if there are none
    model.save_pretrained(path, state_dict=means(model, model.state_dict()), **options)
    write_noise(model, path)


def means(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a state dict for the `save_pretrained` of a model: without the noise.

    PEFT reads every tensor of a module that it saves, so an adapter keeps its noise. A plain
    adapter ignores it.

    Args:
        model: the noisy model.
        state: its state dict.

    Returns:
        The tensors to save.
    """
    noise = set() if is_adapted(model) else noise_names(model)
    return {name: tensor for name, tensor in state.items() if name not in noise}


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a PEFT model.

    Args:
        model: any module.

    Returns:
        Whether it is a PEFT model.
    """
    peft = sys.modules.get("peft")  # without an import there are no such models
    return peft is not None and isinstance(model, peft.PeftModel)


def write_noise(model: nn.Module, path: str | os.PathLike[str], **extra: Json) -> None:
    """Write the noise of a model next to its means, with the checksums of their files.

    The checksums reveal an interrupted save.

    Args:
        model: the noisy model.
        path: the directory of the means.
        extra: further values to store.
    """
    tensors, description = contents(model, noise_alone=True)
    folder = Path(path)
    files = (file for pattern in _WEIGHTS for file in folder.glob(pattern))
    sums = {file.relative_to(folder).as_posix(): _checksum(file) for file in files}
    write_tensors(folder / NOISE, tensors, {**description, **extra, "weights": sums})


def _checksum(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def from_pretrained(kind: Any, path: str | os.PathLike[str], **options: object) -> Any:
    """Load a noisy model of `save_pretrained`, with its means, posteriors and ties.

    Args:
        kind: the class of the model, or an `AutoModel...` class. For an adapter, the base model.
        path: the directory, or a name on the Hub.
        options: for `from_pretrained` of the class.

    Returns:
        The noisy model.
    """
    noise = read_noise(path, **options)
    if isinstance(kind, nn.Module):
        model = import_optional("peft", "huggingface").PeftModel.from_pretrained(
            kind, path, **options
        )
    else:
        model = kind.from_pretrained(path, **options)
    restore(model, *noise, path, noise_alone=True)
    return model


def read_noise(
    path: str | os.PathLike[str], **options: object
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the noise of a checkpoint.

    Args:
        path: the directory, or a name on the Hub.
        options: for the download from the Hub.

    Returns:
        The noise tensors by name, and the description with the recipes of the modules.
    """
    tensors, description = read_tensors(_file_in(path, NOISE, options))
    if not is_description(description) or not isinstance(description.get("weights"), dict):
        raise VardropError(
            f"Expected {NOISE} in {path} to be a file of save_pretrained, but got another file."
        )
    for name, checksum in description["weights"].items():
        if _checksum(_file_in(path, name, options)) != checksum:
            raise VardropError(
                f"Expected {NOISE} in {path} to belong to {name} there, but they come from two "
                "saves, of which one was interrupted. Save the model again, or load an earlier "
                "checkpoint."
            )
    return tensors, description


def _file_in(path: str | os.PathLike[str], name: str, options: Mapping[str, object]) -> Path:
    """The path of a file of a checkpoint, downloaded from the Hub if necessary."""
    hub_options = {option: options[option] for option in _HUB if option in options}
    try:
        return Path(cached_file(path, name, **hub_options))
    except OSError as missing:
        raise VardropError(
            f"Expected {name} in {path}, but it is not there. Copy it from the directory of the "
            "saved model, or load the plain model with from_pretrained of its class and convert it."
        ) from missing
