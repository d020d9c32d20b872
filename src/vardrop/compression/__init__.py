"""Compression: relevance, threshold, shrink, sparse execution, files, export, and afterwards."""

from vardrop.compression.comparing import Comparison, Figures, compare
from vardrop.compression.exporting import Draws, export_onnx, export_program
from vardrop.compression.files import load, save
from vardrop.compression.finishing import fine_tune, reestimate_batchnorm
from vardrop.compression.masks import masked
from vardrop.compression.packing import PackReport, pack, unpack
from vardrop.compression.parts import Scale, Select
from vardrop.compression.report import LayerCost, LayerReport, ShrinkReport
from vardrop.compression.shrinking import plan_shrink, shrink
from vardrop.compression.sparse import SparseLinear, sparsify
from vardrop.compression.threshold import Point, Threshold, choose_threshold

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
    "ShrinkReport",
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
