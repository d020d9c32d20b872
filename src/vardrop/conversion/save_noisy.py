"""A noisy model as a file: the recipe of every module and all tensors, with a checksum."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.files import read_tensors, write_tensors
from vardrop._core.values import Json, from_json, to_json
from vardrop.conversion.convert import all_or_nothing
from vardrop.conversion.plan import rule_of
from vardrop.conversion.rules import ConversionRule, Scope, join_names
from vardrop.gates import Gate, SwitchableDropout, SwitchedMode, functional_dropout_rates
from vardrop.heads import Head
from vardrop.layers import Ties, Variational
from vardrop.likelihoods import check_model
from vardrop.noisy import Noisy, enclosed, named_modules_of, noisy_modules
from vardrop.recipes import BaseRecipe, HeadRecipe, Recipe, SwitchDropout

Net = TypeVar("Net", bound=nn.Module)
PathLike = str | os.PathLike[str]
Entry = dict[str, Any]  # the description of one noisy module
_FORMAT = "vardrop noisy net 1"


def save_noisy(net: nn.Module, path: PathLike) -> None:
    """Write a noisy model into one file. `load_noisy` restores it in another process.

    The file holds the recipe of every noisy module and the tensors of the model, including buffers
    and means. A tied tensor is stored once. It is a safetensors file with a checksum. It is renamed
    when it is complete, so an interrupted call leaves no partial file. A learned likelihood is not
    part of the model, so save its `state_dict` separately. (`save` and `load` are for models that
    `shrink` made.)

    Args:
        net: a model with noisy modules, by one conversion or several.
        path: the file. An existing file is replaced.

    >>> import tempfile, torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vd.save_noisy(net, f"{folder}/net.safetensors")
    ...     again = vd.load_noisy(f"{folder}/net.safetensors", into=torch.nn.Linear(3, 2))
    >>> torch.equal(again.weight, net.weight), again.posterior == net.posterior
    (True, True)
    """
    check_model(net)
    check_type("path", path, str | os.PathLike, "a path")
    write_tensors(Path(path), *contents(net))


def contents(
    net: nn.Module, noise_alone: bool = False
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """The tensors of a noisy model and its description, as `restore` takes them.

    Args:
        net: a noisy model.
        noise_alone: whether to leave out the means and all tensors without noise.

    Returns:
        The tensors and the description.
    """
    noisy_modules(net)  # raises if there are none
    tensors, tied = _tensors(net, noise_alone)
    return tensors, {
        "format": _FORMAT,
        "modules": _entries(net),
        "tied": tied,
        "frozen": sorted(k for k, t in tensors.items() if not t.requires_grad),
    }


def noise_names(net: nn.Module) -> set[str]:
    """The names of noise tensors in the state dict of a model: all but means and plain tensors.

    Args:
        net: a model.

    Returns:
        The names.

    >>> import vardrop as vd
    >>> sorted(noise_names(vd.convert(nn.Sequential(nn.Linear(2, 1)), vd.sparse_vd())))
    ['0.log_sigma2']
    """
    modules = net.named_modules(remove_duplicate=False)
    noisy = ((name, module) for name, module in modules if isinstance(module, Noisy))
    return {f"{name}.{key}".lstrip(".") for name, module in noisy for key in module.noise_names()}


def load_noisy(path: PathLike, into: Net) -> Net:
    """Restore a noisy model from a file of `save_noisy`, in place.

    If the file contains values of custom types, import these types first.

    Args:
        path: the file.
        into: the model before `convert`, with the modules, shapes, precisions and tied weights of
            the file. If something differs, an error names it and the model is unchanged. Modules
            that the class of the model makes noisy must have the same noise.

    Returns:
        The model `into`.
    """
    check_net(into, "into")
    check_type("path", path, str | os.PathLike, "a path")
    tensors, description = read_tensors(Path(path))
    if not is_description(description):
        raise VardropError(
            f"Expected {path} to be a net that vardrop.save_noisy wrote, but got another file. "
            "Files of vardrop.save are read by vardrop.load."
        )
    restore(into, tensors, description, path)
    return into


def restore(
    into: nn.Module,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    path: PathLike,
    noise_alone: bool = False,
) -> None:
    """Make a plain model noisy as `contents` described.

    Args:
        into: the plain model.
        tensors: as `contents` returned them.
        description: as `contents` returned it.
        path: the file, for messages.
        noise_alone: whether the model keeps its plain tensors.
    """
    entries, tied = description["modules"], description["tied"]
    recipes = {name: _recipe(entry, path) for name, entry in entries.items()}
    modules, noisy = dict(into.named_modules()), _entries(into)
    rules = {
        n: rule_of(recipe, Scope(into, [modules[n]]))
        for n, recipe in recipes.items()
        if n in modules
    }
    plain = {n: _entry_of_plain(modules[n], rules[n], entries[n]) for n in rules}
    _check_equal(path, _describe_modules({**plain, **noisy}), _describe_modules(entries))
    rewrites = any(rule.rewrites for rule in rules.values())
    with all_or_nothing([into], values=rewrites), torch.random.fork_rng(devices=[]):
        before, noise = set(into.state_dict()), cast(Ties, {})
        for name in rules.keys() - noisy.keys():
            rules[name].change(modules[name], noise)
        state = into.state_dict(keep_vars=True)
        for alias, first in tied.items():  # existing tensors keep their ties
            if alias in state and first in state and alias not in before:
                owner, _, attribute = alias.rpartition(".")
                setattr(into.get_submodule(owner), attribute, state[first])
        net_tensors, net_ties = _tensors(into, noise_alone)
        texts = _describe_tensors(net_tensors, net_ties), _describe_tensors(tensors, tied)
        _check_equal(path, *texts)
        for name, tensor in net_tensors.items():
            if name not in before and isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name not in description["frozen"])
            with torch.no_grad():
                tensor.copy_(tensors[name])
    update_encoder_fastpath(into, Noisy)


def _entries(net: nn.Module) -> dict[str, Entry]:
    """The descriptions of noisy modules by name. A gate inside a layer belongs to the layer."""
    entries, inside = {}, enclosed(net)
    for name, module in named_modules_of(net, Noisy).items():
        recipe: BaseRecipe = SwitchDropout()
        numbers: dict[str, Json] = {}
        if id(module) in inside:
            continue
        if isinstance(module, Variational):
            gate = None if module.gate is None else module.gate.noise
            if module.posterior is None and gate is None:
                continue  # a layer without a method
            method = module.posterior, module.prior, module.estimator, gate, module.noisy_bias
            recipe = Recipe(*method)
        elif isinstance(module, Gate):
            recipe, numbers = Recipe(gate=module.noise), {"units": module.units}
        elif isinstance(module, Head):
            recipe = HeadRecipe(module.rule)
        elif isinstance(module, SwitchableDropout):
            numbers = {"rate": module.p}
        elif isinstance(module, SwitchedMode):
            numbers = {"rates": functional_dropout_rates(module)}
        else:
            raise VardropError(
                f"Expected layers, gates, heads and dropout of vardrop in `net`, but got "
                f"{type(module).__name__} at '{name}'. Save `net.state_dict()` yourself."
            )
        entries[name] = {"type": type(module).__name__, **numbers, "recipe": to_json(recipe)}
    return entries


def _entry_of_plain(module: nn.Module, rule: ConversionRule, entry: Entry) -> Entry:
    """The entry of a plain module after a conversion as in a file: type and rates are its own."""
    entry = {**entry, "type": getattr(rule.noisy_type(module), "__name__", type(module).__name__)}
    if "rate" in entry:
        entry["rate"] = getattr(module, "p", None)
    if "rates" in entry:
        entry["rates"] = functional_dropout_rates(module)
    return entry


def _tensors(net: nn.Module, noise_alone: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model by their first names, and the first name of every other name."""
    state, first = net.state_dict(keep_vars=True), dict[int, str]()
    if noise_alone:
        names = noise_names(net)
        state = {name: tensor for name, tensor in state.items() if name in names}
    for name, tensor in state.items():
        if getattr(tensor, "is_meta", True):
            kind = "a meta tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise VardropError(
                f"Expected the state of the net to be tensors with values, but got {kind} at "
                f"'{name}'. Keep other state elsewhere, and give meta tensors memory first."
            )
        first.setdefault(id(tensor), name)
    tied = {name: first[id(t)] for name, t in state.items() if first[id(t)] != name}
    return {name: t for name, t in state.items() if name not in tied}, tied


def is_description(values: Any) -> bool:
    """Whether a value has the outline of a description by `contents`.

    Args:
        values: as read from a file.

    Returns:
        Whether it can be passed to `restore`.
    """
    has_format = isinstance(values, dict) and values.get("format") == _FORMAT
    types = {"modules": dict, "tied": dict, "frozen": list}
    complete = has_format and all(isinstance(values.get(k), t) for k, t in types.items())
    return complete and all(isinstance(first, str) for first in values["tied"].values())


def _recipe(entry: Any, path: PathLike) -> BaseRecipe:
    remedy = "It is damaged, or was not written by vardrop.save_noisy."
    check_type(f"each module in {path}", entry, dict, "described by its recipe", remedy)
    check_type(f"`type` in {path}", entry.get("type"), str, "the name of a layer", remedy)
    recipe = from_json(entry.get("recipe"))
    check_type(f"`recipe` in {path}", recipe, BaseRecipe, "a recipe", remedy)
    return cast(BaseRecipe, recipe)


def _describe_modules(entries: dict[str, Entry]) -> dict[str, str]:
    """A text about every noisy module: its type, its recipe and its other numbers."""
    texts = {}
    for name, entry in entries.items():
        facts = {**entry, "recipe": from_json(entry["recipe"])}
        numbers = ", ".join(f"{key}={fact}" for key, fact in facts.items() if key != "type")
        texts[f"module '{name or '(net)'}'"] = f"{entry['type']} with {numbers}"
    return texts


def _describe_tensors(tensors: dict[str, Tensor], tied: dict[str, str]) -> dict[str, str]:
    """A text about every name of a tensor: its type and shape, or the name that it is tied to."""
    texts = {f"'{name}'": f"{t.dtype} {tuple(t.shape)}" for name, t in tensors.items()}
    return texts | {f"'{alias}'": f"tied to '{first}'" for alias, first in tied.items()}


def _check_equal(path: PathLike, net: dict[str, str], file: dict[str, str]) -> None:
    different = [f"{name} is missing" for name in file if name not in net]
    different += [f"{name} is not in the file" for name in net if name not in file]
    both = sorted(net.keys() & file.keys())
    different += [f"{n} is {net[n]}, in the file {file[n]}" for n in both if net[n] != file[n]]
    if different:
        raise VardropError(
            f"Expected `into` to be the net of {path} before it was converted, but "
            f"{join_names(different)}. Build it in the same way."
        )
