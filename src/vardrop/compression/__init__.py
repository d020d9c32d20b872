"""Compression: mask, threshold, shrink, files."""

from vardrop.compression.costs import LayerCost as LayerCost
from vardrop.compression.mask import zero_pruned_weights as zero_pruned_weights
from vardrop.compression.modules.select import Scale as Scale, Select as Select
from vardrop.compression.pack import PackReport as PackReport, pack as pack, unpack as unpack
from vardrop.compression.save import load as load, save as save
from vardrop.compression.shrink import (
    LayerReport as LayerReport,
    ShrinkPlan as ShrinkPlan,
    Shrunk as Shrunk,
    shrink as shrink,
)
from vardrop.compression.threshold import (
    Point as Point,
    Threshold as Threshold,
    choose_threshold as choose_threshold,
)
