"""Calls that draw, repeated from one state of the global generator."""

import torch


def replay(call, *args, **kwargs):
    """What a call returns; the state of the global generator is the same afterwards."""
    with torch.random.fork_rng(devices=[]):
        return call(*args, **kwargs)
