"""Training: one small loop, and how to keep it in a directory so that nothing is lost."""

from vardrop.errors import NotFiniteError
from vardrop.training.loop import Epoch, Loop, train
from vardrop.training.recording import Recorder, read_history
from vardrop.training.settings import Settings
from vardrop.training.step import Step

__all__ = [
    "Epoch",
    "Loop",
    "NotFiniteError",
    "Recorder",
    "Settings",
    "Step",
    "read_history",
    "train",
]
