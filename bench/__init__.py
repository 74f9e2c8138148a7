"""Benchmarks of this machine, pictures and tables of the docs: `python -m bench`."""
