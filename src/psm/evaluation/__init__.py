"""Scores of frozen encoders, and what a trained run mines. Knows nothing of training."""
