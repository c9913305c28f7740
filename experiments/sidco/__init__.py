"""SIDCo and its rivals: `python -m experiments sidco NAME`. Their speed is `bench select`."""
