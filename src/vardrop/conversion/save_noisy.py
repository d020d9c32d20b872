"""A noisy net as a file: the recipe of every module and all tensors, with a checksum."""

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
from vardrop._core.values import from_json, to_json
from vardrop.conversion.convert import all_or_nothing
from vardrop.conversion.plan import rule_of
from vardrop.conversion.rules import ConversionRule
from vardrop.conversion.selection import join_names
from vardrop.gates import Gate, SwitchableDropout, SwitchedMode, functional_dropout_rates
from vardrop.heads import Head
from vardrop.layers import Ties, Variational
from vardrop.noisy import Noisy, enclosed, named_modules_of, noisy_modules
from vardrop.recipes import BaseRecipe, HeadRecipe, Recipe, SwitchDropout

Net = TypeVar("Net", bound=nn.Module)
Entry = dict[str, Any]  # what the file says of one noisy module
_FORMAT = "vardrop noisy net 1"


def save_noisy(net: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a noisy net into one file, from which `load_noisy` restores it in another process.

    The file holds the recipe of every noisy module and the tensors of the whole net, buffers and
    the means included, a tied one once. It is a safetensors file with a checksum, written aside
    and renamed, so that it is whole or not there. A learned likelihood is not part of the net:
    save its `state_dict` beside it. (`save` and `load` are for nets that `shrink` made.)

    Args:
        net: a net with noisy modules, by one conversion or several.
        path: where to; a file that is there is replaced.

    >>> import tempfile, torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vd.save_noisy(net, f"{folder}/net.safetensors")
    ...     again = vd.load_noisy(f"{folder}/net.safetensors", into=torch.nn.Linear(3, 2))
    >>> torch.equal(again.weight, net.weight), again.posterior == net.posterior
    (True, True)
    """
    check_net(net)
    check_type("path", path, str | os.PathLike, "a path")
    tensors, values = contents(net)
    write_tensors(Path(path), tensors, values)


def contents(net: nn.Module, noise_alone: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a noisy net and what else a file must say, as `restore` takes them.

    With `noise_alone` the means, and all tensors without noise, are left out.
    """
    noisy_modules(net)  # an error where there are none
    tensors, tied = _tensors(net, noise_alone)
    return tensors, {
        "format": _FORMAT,
        "modules": _entries(net),
        "tied": tied,
        "frozen": sorted(k for k, t in tensors.items() if not t.requires_grad),
    }


def noise_names(net: nn.Module) -> set[str]:
    """The names in the state of a net of tensors that describe noise: all but means and the rest.

    >>> import vardrop as vd
    >>> sorted(noise_names(vd.convert(nn.Sequential(nn.Linear(2, 1)), vd.sparse_vd())))
    ['0.log_sigma2']
    """
    modules = net.named_modules(remove_duplicate=False)
    noisy = ((name, module) for name, module in modules if isinstance(module, Noisy))
    return {f"{name}.{key}".lstrip(".") for name, module in noisy for key in module.noise_names()}


def load_noisy(path: str | os.PathLike[str], into: Net) -> Net:
    """Restore the noisy net that `save_noisy` wrote, in place.

    Args:
        path: the file.
        into: the net as it was before `convert`: its modules, shapes, precisions and tied weights
            must be those of the file, or an error names what differs and the net stays as it is.
            Modules that its own class makes noisy must be so in the same way.

    Types of values that are not this library's own must be imported before.
    """
    check_net(into, "into")
    check_type("path", path, str | os.PathLike, "a path")
    tensors, values = read_tensors(Path(path))
    if not is_description(values):
        raise VardropError(
            f"Expected {path} to be a net that vardrop.save_noisy wrote, but got another file. "
            "Files of vardrop.save are read by vardrop.load."
        )
    restore(into, tensors, values, path)
    return into


def restore(
    into: nn.Module,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    path: str | os.PathLike[str],
    noise_alone: bool = False,
) -> None:
    """Make a plain net what `contents` described; with `noise_alone` its own tensors stay."""
    recipes = {name: _recipe(entry, path) for name, entry in values["modules"].items()}
    modules = dict(into.named_modules())
    kinds = {n: rule_of(recipe, [modules[n]]) for n, recipe in recipes.items() if n in modules}
    noisy = _entries(into)
    _refuse(path, _misfits(modules, noisy, values["modules"], kinds))
    rewrites = any(kind.rewrites for kind in kinds.values())
    with all_or_nothing([into], values=rewrites), torch.random.fork_rng(devices=[]):
        before = set(into.state_dict())
        made: Ties = {}
        for name in kinds.keys() - noisy.keys():
            kinds[name].restore(modules[name], made)
        _tie(into, values["tied"], before)
        net_tensors, tied = _tensors(into, noise_alone)
        _refuse(
            path, [*_differences(net_tensors, tensors), *_tie_differences(tied, values["tied"])]
        )
        parameters = dict(into.named_parameters(remove_duplicate=False))
        for name in set(net_tensors) - before:
            if name in parameters:
                parameters[name].requires_grad_(name not in values["frozen"])
        with torch.no_grad():
            for name, tensor in net_tensors.items():
                tensor.copy_(tensors[name])
    update_encoder_fastpath(into, Noisy)


def _entries(net: nn.Module) -> dict[str, Entry]:
    """What to write of each noisy module, by its name; a gate inside a layer is the layer's."""
    entries, inside = {}, enclosed(net)
    for name, module in named_modules_of(net, Noisy).items():
        if id(module) not in inside and (method := _method(name, module)) is not None:
            recipe, rates = method
            entries[name] = {"type": type(module).__name__, **rates, "recipe": to_json(recipe)}
    return entries


def _method(name: str, module: Noisy) -> tuple[BaseRecipe, dict[str, Any]] | None:
    """The recipe of a noisy module and its other numbers; None for a layer without a method."""
    if isinstance(module, Variational):
        gate = None if module.gate is None else module.gate.noise
        method = module.posterior, module.prior, module.estimator, gate, module.noisy_bias
        none = module.posterior is None and gate is None
        return None if none else (Recipe(*method), {})
    if isinstance(module, Gate):
        return Recipe(gate=module.noise), {"units": module.units}
    if isinstance(module, Head):
        return HeadRecipe(module.rule), {}
    if isinstance(module, SwitchableDropout):
        return SwitchDropout(), {"rate": module.p}
    if isinstance(module, SwitchedMode):
        return SwitchDropout(), {"rates": functional_dropout_rates(module)}
    raise VardropError(
        f"Expected layers, gates, heads and dropout of vardrop in `net`, but got "
        f"{type(module).__name__} at '{name}'. Save `net.state_dict()` yourself."
    )


def _tensors(net: nn.Module, noise_alone: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a net by name, a tied one by its first, and the first names of the others."""
    state = net.state_dict(keep_vars=True)
    if noise_alone:
        noise = noise_names(net)
        state = {name: tensor for name, tensor in state.items() if name in noise}
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        kind = "a meta tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
        if getattr(tensor, "is_meta", True):
            raise VardropError(
                f"Expected the state of the net to be tensors with values, but got {kind} at "
                f"'{name}'. Keep other state elsewhere, and give meta tensors memory first."
            )
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, tied


def is_description(values: Any) -> bool:
    """Whether a value is what `contents` says of a net, as far as its outline."""
    has_format = isinstance(values, dict) and values.get("format") == _FORMAT
    wanted = {"modules": dict, "tied": dict, "frozen": list}
    complete = has_format and all(isinstance(values.get(k), t) for k, t in wanted.items())
    return complete and all(isinstance(first, str) for first in values["tied"].values())


def _recipe(entry: Any, path: str | os.PathLike[str]) -> BaseRecipe:
    remedy = "It is damaged, or was not written by vardrop.save_noisy."
    check_type(f"each module in {path}", entry, dict, "described by its recipe", remedy)
    check_type(f"`type` in {path}", entry.get("type"), str, "the name of a layer", remedy)
    recipe = from_json(entry.get("recipe"))
    check_type(f"`recipe` in {path}", recipe, BaseRecipe, "a recipe", remedy)
    return cast(BaseRecipe, recipe)


def _misfits(
    modules: dict[str, nn.Module],
    noisy: dict[str, Entry],
    entries: dict[str, Entry],
    kinds: dict[str, ConversionRule],
) -> list[str]:
    """The modules that are not there, or not what the file needs."""
    misfits = []
    for name, entry in entries.items():
        module = modules.get(name)
        if module is None:
            misfits.append(f"module '{name}' is missing")
        elif name in noisy and noisy[name] != entry:
            misfits.append(f"module '{name or '(net)'}' is noisy in another way")
        elif name not in noisy and _noisy_name(kinds[name], module) != entry["type"]:
            kind = type(module).__name__
            misfits.append(f"module '{name or '(net)'}' is a {kind}, in the file a {entry['type']}")
        elif "rate" in entry and getattr(module, "p", None) != entry["rate"]:
            misfits.append(f"the rate of '{name}' is {module.p}, in the file {entry['rate']}")
        elif "rates" in entry and (rates := functional_dropout_rates(module)) != entry["rates"]:
            misfits.append(f"the rates of '{name}' are {rates}, in the file {entry['rates']}")
    extra = [name for name in noisy if name not in entries]
    return misfits + [f"module '{name}' is noisy, in the file plain" for name in extra]


def _noisy_name(kind: ConversionRule, module: nn.Module) -> str | None:
    """The name of the noisy type that a plain module can become."""
    return getattr(kind.noisy_type(module), "__name__", None)


def _tie(into: nn.Module, tied: dict[str, str], before: set[str]) -> None:
    """Let noise be shared as the file says; the net's own tensors stay as they are."""
    tensors = into.state_dict(keep_vars=True)
    for alias, first in tied.items():
        if alias in tensors and first in tensors and alias not in before:
            owner, _, name = alias.rpartition(".")
            setattr(into.get_submodule(owner), name, tensors[first])


def _differences(net_tensors: dict[str, Tensor], file_tensors: dict[str, Tensor]) -> list[str]:
    texts = [f"'{name}' is missing" for name in file_tensors if name not in net_tensors]
    texts += [f"'{name}' is not in the file" for name in net_tensors if name not in file_tensors]
    for name in sorted(set(net_tensors) & set(file_tensors)):
        net, file = net_tensors[name], file_tensors[name]
        if net.shape != file.shape:
            texts.append(f"'{name}' is {tuple(net.shape)}, in the file {tuple(file.shape)}")
        elif net.dtype != file.dtype:
            texts.append(f"'{name}' is {net.dtype}, in the file {file.dtype}")
    return texts


def _tie_differences(net_ties: dict[str, str], file_ties: dict[str, str]) -> list[str]:
    texts = []
    for alias, first in sorted(set(net_ties.items()) ^ set(file_ties.items())):
        place = "net" if net_ties.get(alias) == first else "file"
        texts.append(f"'{alias}' and '{first}' are tied in the {place} only")
    return texts


def _refuse(path: str | os.PathLike[str], differences: list[str]) -> None:
    if differences:
        raise VardropError(
            f"Expected `into` to be the net of {path} before it was converted, but "
            f"{join_names(differences)}. Build it as it was."
        )
