"""Layers with recipes, to parametrize by: the covering pairs always, the others in the slow run."""

import pytest

from vardrop.testing import cases


def covering(count: int = 4) -> list[tuple[str, str]]:
    """Pairs in which every layer has `count` recipes or more, and every recipe as many layers.

    Layers and recipes are independent parts, so that a fault in one of them shows without the
    product of both tables. The pairs are always the same, and spread over the tables.
    """
    pairs, covered = list(cases()), set()
    for side in (0, 1):
        for number, name in enumerate(dict.fromkeys(pair[side] for pair in pairs)):
            partners = [pair for pair in pairs if pair[side] == name]
            wanted = min(count, len(partners))
            steps = [5 * number + step * len(partners) // wanted for step in range(wanted)]
            covered |= {partners[step % len(partners)] for step in steps}
    return [pair for pair in pairs if pair in covered]


def slow_but(names, *always: str) -> list:
    """The names, to parametrize by: those that always run, and the others in the slow run."""
    return [n if n in always else pytest.param(n, marks=pytest.mark.slow) for n in names]


ALWAYS = set(covering(1))
PAIRS = [pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.slow) for pair in cases()]
