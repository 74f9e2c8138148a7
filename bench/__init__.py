"""Benchmarks of this machine: `python -m bench`."""
