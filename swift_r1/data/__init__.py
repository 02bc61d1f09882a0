"""Datasets: registration, preprocessing, loading, prompts. Importing it loads neither torch nor datasets."""

from swift_r1.data.loading import load_dataset
from swift_r1.data.preprocessors import (
    AlpacaPreprocessor,
    AutoPreprocessor,
    MessagesPreprocessor,
    ResponsePreprocessor,
    RowPreprocessor,
)
from swift_r1.data.registry import DatasetMeta, SubsetDataset, register_dataset

__all__ = [
    "AlpacaPreprocessor",
    "AutoPreprocessor",
    "DatasetMeta",
    "MessagesPreprocessor",
    "ResponsePreprocessor",
    "RowPreprocessor",
    "SubsetDataset",
    "load_dataset",
    "register_dataset",
]
