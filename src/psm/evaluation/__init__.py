"""Scores of frozen encoders, and what a trained run mines. Knows nothing of training."""

from psm.models.torchvision_ops import define_missing_operators

define_missing_operators()  # before Lightning is imported, which imports torchvision where it is installed
