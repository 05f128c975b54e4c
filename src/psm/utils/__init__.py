"""Errors, seeds, files, locks, devices: what every other room may use."""
