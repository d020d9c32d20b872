"""Training: one small loop over tensors."""

from vardrop.training.loop import Epoch, train

__all__ = ["Epoch", "train"]
