"""Training: one small loop, and how to keep it in a directory so that nothing is lost."""

from vardrop.errors import NotFiniteError as NotFiniteError
from vardrop.training.loop import (
    Epoch as Epoch,
    Loop as Loop,
    train as train,
)
from vardrop.training.recording import (
    Recorder as Recorder,
    read_history as read_history,
)
from vardrop.training.settings import Settings as Settings
from vardrop.training.step import Step as Step
