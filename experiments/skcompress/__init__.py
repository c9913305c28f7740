"""SKCompress and its rivals: `python -m experiments skcompress NAME`. Its speed in jit is `bench skcompress`."""
