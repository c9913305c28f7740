"""The laws of compressors, algorithms, routes and payloads, for those of your own. Needs no test framework.

`check`, `check_algorithm`, `check_route` and `check_payload` try every law and raise one `LawBroken` with a sentence
for each that does not hold. The laws stand in `LAWS`, `ALGORITHM_LAWS`, `ROUTE_LAWS` and `PAYLOAD_LAWS` by name.
"""

from jaxcomp.testing.algorithms import ALGORITHM_LAWS, check_algorithm
from jaxcomp.testing.compressors import LAWS, Subject, check
from jaxcomp.testing.law import LawBroken
from jaxcomp.testing.payloads import PAYLOAD_LAWS, check_payload
from jaxcomp.testing.routes import ROUTE_LAWS, check_route

__all__ = [
    "ALGORITHM_LAWS",
    "LAWS",
    "PAYLOAD_LAWS",
    "ROUTE_LAWS",
    "LawBroken",
    "Subject",
    "check",
    "check_algorithm",
    "check_payload",
    "check_route",
]
