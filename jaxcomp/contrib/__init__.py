"""Historical rivals of the methods that one should use, each as it was published, and with what is its own alone.

Two more are options of what one should use: `jc.sidco` with adapt=None, "paper" or "climb" (`sidco_published`), and
`jc.skcompress` with mode="paper" (`skcompress_released`). Nothing outside imports these files, apart from the three
functions whose options name them, when they are asked for.
"""

from jaxcomp.contrib.dgc import dgc
from jaxcomp.contrib.gaussian_k import gaussian_k
from jaxcomp.contrib.hard_threshold import hard_threshold
from jaxcomp.contrib.momentum_correction import momentum_correction
from jaxcomp.contrib.redsync import redsync

__all__ = ["dgc", "gaussian_k", "hard_threshold", "momentum_correction", "redsync"]
