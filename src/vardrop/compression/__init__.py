"""Compression: relevance, threshold, shrink, sparse execution, files, and afterwards."""

from vardrop.compression.comparing import (
    Point as Point,
    Threshold as Threshold,
    choose_threshold as choose_threshold,
)
from vardrop.compression.files import (
    load as load,
    save as save,
)
from vardrop.compression.finishing import (
    SparseLinear as SparseLinear,
    fine_tune as fine_tune,
    reestimate_batchnorm as reestimate_batchnorm,
    sparsify as sparsify,
)
from vardrop.compression.kinds import (
    Lookup as Lookup,
    Scale as Scale,
    Select as Select,
)
from vardrop.compression.masks import masked as masked
from vardrop.compression.packing import (
    PackReport as PackReport,
    pack as pack,
    unpack as unpack,
)
from vardrop.compression.shrinking import (
    LayerCost as LayerCost,
    LayerReport as LayerReport,
    ShrinkPlan as ShrinkPlan,
    plan_shrink as plan_shrink,
    shrink as shrink,
)
