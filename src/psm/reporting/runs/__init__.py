"""Runs of a folder: a list, the best of them, two side by side, and a live local page."""
