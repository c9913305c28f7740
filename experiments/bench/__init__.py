"""Benchmarks: `python -m experiments bench NAME`. Every figure is a ratio within one run."""
