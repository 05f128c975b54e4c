"""Faster functions for x86 CPUs, behind one door."""
