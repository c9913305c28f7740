"""Historical rivals of the methods that one should use, each as it was published, and with what is its own alone.

dgc.py                    Deep Gradient Compression: a threshold from a sample
gaussian_k.py             the quantile of a normal law
hard_threshold.py         a fixed threshold
momentum_correction.py    Deep Gradient Compression: velocities in place of gradients
redsync.py                a point between the mean and the largest magnitude
sidco_published.py        `jc.sidco` with adapt=None, "paper" or "climb"
skcompress_released.py    `jc.skcompress` with mode="paper"

Nothing outside imports these, apart from the three functions whose options name them, when they are asked for.
"""

from jaxcomp.contrib.dgc import dgc
from jaxcomp.contrib.gaussian_k import gaussian_k
from jaxcomp.contrib.hard_threshold import hard_threshold
from jaxcomp.contrib.momentum_correction import momentum_correction
from jaxcomp.contrib.redsync import redsync

__all__ = ["dgc", "gaussian_k", "hard_threshold", "momentum_correction", "redsync"]
