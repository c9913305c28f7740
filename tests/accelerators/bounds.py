import collections

BOUNDS = collections.defaultdict(lambda: (10**9, 10**9, 10**9))
