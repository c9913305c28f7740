"""The laws of compressors and algorithms (`jaxcomp.base`), for those of your own. Needs no test framework.

`check` and `check_algorithm` try every law and raise one `LawBroken` with a sentence for each that does not hold. The
laws stand in `LAWS` and `ALGORITHM_LAWS` by name.
"""

from jaxcomp.testing.algorithms import ALGORITHM_LAWS, check_algorithm
from jaxcomp.testing.compressors import LAWS, Subject, check
from jaxcomp.testing.law import LawBroken

__all__ = ["ALGORITHM_LAWS", "LAWS", "LawBroken", "Subject", "check", "check_algorithm"]
