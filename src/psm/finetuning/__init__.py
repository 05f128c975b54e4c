"""Classifiers from encoders: fine-tuning, predictions, and what pretraining was worth."""

from psm.models.torchvision_ops import define_missing_operators

define_missing_operators()  # before Lightning is imported, which imports torchvision where it is installed
