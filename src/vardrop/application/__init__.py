"""The application: fit, evaluate, compress, report; what the command line and notebooks call."""

from vardrop.application.compressing import compress, slim_run
from vardrop.application.evaluation import evaluate
from vardrop.application.fitting import fit, resume
from vardrop.application.methods import METHODS, method_named, methods
from vardrop.application.nets import NETS, build_net
from vardrop.application.predictions import prediction_table, write_predictions
from vardrop.application.run import Run, load_run
from vardrop.application.slimmed import Slimmed, latencies
from vardrop.application.slimming import slim
from vardrop.application.tuning import fine_tune, laplace

__all__ = [
    "METHODS",
    "NETS",
    "Run",
    "Slimmed",
    "build_net",
    "compress",
    "evaluate",
    "fine_tune",
    "fit",
    "laplace",
    "latencies",
    "load_run",
    "method_named",
    "methods",
    "prediction_table",
    "resume",
    "slim",
    "slim_run",
    "write_predictions",
]
