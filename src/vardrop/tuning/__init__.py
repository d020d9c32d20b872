"""Verbs that train a model: train, slim, fine_tune, and the loop below them."""

from vardrop._core.errors import NotFiniteError as NotFiniteError
from vardrop.tuning.batchnorm import reestimate_batchnorm as reestimate_batchnorm
from vardrop.tuning.fine_tune import fine_tune as fine_tune
from vardrop.tuning.slim import slim as slim
from vardrop.tuning.slim_report import Slimmed as Slimmed, latencies as latencies
from vardrop.tuning.step import Step as Step
from vardrop.tuning.train import (
    Epoch as Epoch,
    Loop as Loop,
    train as train,
)
