"""Verbs that train a model (train, slim, fine_tune, distil) and the one training loop below."""

from vardrop._core.errors import NotFiniteError as NotFiniteError
from vardrop.tuning.batchnorm import reestimate_batchnorm as reestimate_batchnorm
from vardrop.tuning.distil import distil as distil
from vardrop.tuning.fine_tune import fine_tune as fine_tune
from vardrop.tuning.minimize import Callback as Callback, Position as Position, minimize as minimize
from vardrop.tuning.slim import slim as slim
from vardrop.tuning.slim_report import Slimmed as Slimmed, latencies as latencies
from vardrop.tuning.train import Epoch as Epoch, Loop as Loop, train as train
