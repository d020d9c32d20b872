"""The named methods with their papers, as their own docstrings tell them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vardrop.data.splits import Kind
from vardrop.errors import VardropError
from vardrop.priors import Normal
from vardrop.recipes import METHODS, BaseRecipe, Recipe, bayes_by_backprop, sparse_vd

__all__ = ["METHODS", "PLAIN", "Method", "method_named", "methods", "usual_method"]

PLAIN = "none"


class Method(NamedTuple):
    """A named method: what it does and where it comes from, one line each."""

    name: str
    summary: str
    paper: str


def methods() -> list[Method]:
    """All named methods.

    >>> [m.paper for m in methods() if m.name == "ard"]
    ['Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.']
    """
    return [_described(name, function) for name, function in METHODS.items()]


def _described(name: str, function: Callable[..., BaseRecipe]) -> Method:
    paragraphs = [" ".join(p.split()) for p in (inspect.getdoc(function) or "").split("\n\n")]
    paper = paragraphs[-1] if len(paragraphs) > 1 else ""
    return Method(name, paragraphs[0], paper)


def usual_method(kind: Kind) -> Recipe:
    """The method where none is given.

    For tables one that cannot collapse: the scale of the prior is learned, so that the KL never
    asks for all weights to vanish. For images one that also says which weights to remove.

    >>> usual_method("table").prior
    Normal(std=1.0, learned=True)
    """
    return sparse_vd() if kind == "image" else bayes_by_backprop(prior=Normal(learned=True))


def method_named(name: str, options: Mapping[str, Any] | None = None) -> BaseRecipe | None:
    """The recipe of a named method, with options of that method; None for the plain net."""
    if name == PLAIN:
        return None
    if name not in METHODS:
        raise VardropError(
            f"Expected a method among {', '.join(METHODS)} or {PLAIN}, but got {name!r}."
        )
    try:
        return METHODS[name](**(options or {}))
    except TypeError as misfit:
        known = ", ".join(inspect.signature(METHODS[name]).parameters) or "none"
        raise VardropError(
            f"Expected options of {name} among {known}, but got: {misfit}."
        ) from misfit
