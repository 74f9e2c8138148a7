"""Benchmarks of this machine: `python -m bench sedd|dpo|data|scale|card|learn|save`."""
