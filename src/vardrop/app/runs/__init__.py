"""Runs: fit, evaluate, compare, compress and export, for the command line and notebooks."""

from vardrop.app.runs.compare import compare_methods as compare_methods
from vardrop.app.runs.compress import compress as compress, slim_run as slim_run
from vardrop.app.runs.evaluate import (
    evaluate as evaluate,
    evaluate_rows as evaluate_rows,
    prediction_table as prediction_table,
    write_predictions as write_predictions,
)
from vardrop.app.runs.run_export import export_run as export_run
from vardrop.app.runs.fit import fit as fit, resume as resume
from vardrop.app.runs.models import (
    NETS as NETS,
    build_net as build_net,
    method_named as method_named,
    methods as methods,
)
from vardrop.app.runs.recorder import Recorder as Recorder
from vardrop.app.runs.run import Run as Run, load_run as load_run
from vardrop.app.runs.settings import Settings as Settings
from vardrop.app.store import read_history as read_history
from vardrop.recipes import METHODS as METHODS
