"""Readers of data sets: files with checksums in, tensors out."""

from vardrop.data.catalog import (
    DATASETS,
    OUT_OF_DISTRIBUTION,
    load_dataset,
    load_out_of_distribution,
)
from vardrop.data.cifar import load_cifar10
from vardrop.data.download import data_directory
from vardrop.data.images import IMAGE_SETS, Images, load_images
from vardrop.data.preprocessing import Preprocessing
from vardrop.data.splits import About, Dataset, Part
from vardrop.data.tables import describe, read_table

__all__ = [
    "DATASETS",
    "IMAGE_SETS",
    "OUT_OF_DISTRIBUTION",
    "About",
    "Dataset",
    "Images",
    "Part",
    "Preprocessing",
    "data_directory",
    "describe",
    "load_cifar10",
    "load_dataset",
    "load_images",
    "load_out_of_distribution",
    "read_table",
]
