"""The memory bank, and how positives and negatives are mined."""
