"""Distributed methods: what each worker sends, and what is made of the mean."""

from jaxcomp.algorithms.diana import diana
from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.algorithms.momentum_correction import momentum_correction

__all__ = ["diana", "direct", "error_feedback", "momentum_correction"]
