"""Encoders, heads and the online and target networks."""
