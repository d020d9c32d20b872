"""Readers of data sets: files with checksums in, tensors out."""

from vardrop.data.images import IMAGE_SETS, Images, data_directory, load_images

__all__ = ["IMAGE_SETS", "Images", "data_directory", "load_images"]
