"""Compression: relevance, threshold, shrink, sparse execution, files, export, and afterwards."""

from vardrop.compression.comparing import (
    Comparison,
    Figures,
    Point,
    Threshold,
    choose_threshold,
    compare,
)
from vardrop.compression.exporting import Draws, export_onnx, export_program
from vardrop.compression.files import load, save
from vardrop.compression.finishing import SparseLinear, fine_tune, reestimate_batchnorm, sparsify
from vardrop.compression.kinds import Scale, Select
from vardrop.compression.masks import masked
from vardrop.compression.packing import PackReport, pack, unpack
from vardrop.compression.shrinking import LayerCost, LayerReport, ShrinkPlan, plan_shrink, shrink

__all__ = [
    "Comparison",
    "Draws",
    "Figures",
    "LayerCost",
    "LayerReport",
    "PackReport",
    "Point",
    "Scale",
    "Select",
    "ShrinkPlan",
    "SparseLinear",
    "Threshold",
    "choose_threshold",
    "compare",
    "export_onnx",
    "export_program",
    "fine_tune",
    "load",
    "masked",
    "pack",
    "plan_shrink",
    "reestimate_batchnorm",
    "save",
    "shrink",
    "sparsify",
    "unpack",
]
