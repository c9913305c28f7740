"""Distributed methods: what each worker sends and what is made of the mean."""

from jaxcomp.algorithms.diana import diana
from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import error_feedback

__all__ = ["diana", "direct", "error_feedback"]
