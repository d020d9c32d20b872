"""The application: fit, evaluate, compress, report; what the command line and notebooks call."""

from vardrop.application.comparing import (
    compare_methods as compare_methods,
    compare_runs as compare_runs,
)
from vardrop.application.compressing import (
    compress as compress,
    slim_run as slim_run,
)
from vardrop.application.evaluation import evaluate as evaluate
from vardrop.application.exporting import export_run as export_run
from vardrop.application.fitting import (
    fit as fit,
    resume as resume,
)
from vardrop.application.named import (
    NETS as NETS,
    build_net as build_net,
    method_named as method_named,
    methods as methods,
)
from vardrop.application.predictions import (
    prediction_table as prediction_table,
    write_predictions as write_predictions,
)
from vardrop.application.rows import evaluate_rows as evaluate_rows
from vardrop.application.run import (
    Run as Run,
    load_run as load_run,
)
from vardrop.application.slimmed import (
    Slimmed as Slimmed,
    latencies as latencies,
)
from vardrop.application.slimming import slim as slim
from vardrop.application.tuning import (
    fine_tune as fine_tune,
    laplace as laplace,
)
from vardrop.recipes import METHODS as METHODS
