"""Readers of data sets: files with checksums in, tensors out."""

from vardrop.app.data.datasets import (
    DATASETS as DATASETS,
    IMAGE_SETS as IMAGE_SETS,
    OUT_OF_DISTRIBUTION as OUT_OF_DISTRIBUTION,
    load_dataset as load_dataset,
    load_images as load_images,
    load_out_of_distribution as load_out_of_distribution,
    register_dataset as register_dataset,
)
from vardrop.app.data.images import (
    Images as Images,
    ImageSet as ImageSet,
    data_directory as data_directory,
    idx_set as idx_set,
    load_cifar10 as load_cifar10,
)
from vardrop.app.data.preprocessing import Preprocessing as Preprocessing, Roles as Roles
from vardrop.app.data.splits import About as About, Dataset as Dataset, Part as Part
from vardrop.app.data.tables import describe as describe, read_table as read_table
