"""Experiments: `python -m experiments NAME`. Not part of the installed package."""
