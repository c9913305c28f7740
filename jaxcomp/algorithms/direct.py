"""Distributed compressed gradient descent: every worker sends its compressed gradient."""

from typing import NamedTuple

from jaxcomp.base import Algorithm, Compressor, Spec, State, check_compressor
from jaxcomp.factories import factory

__all__ = ["check_bounded", "direct"]


class DirectState(NamedTuple):
    """compressor: its state, for each group."""

    compressor: tuple[State, ...]


@factory
def direct(compressor: Compressor) -> Algorithm:
    """Sends C(g_i); the direction is the mean of what was sent (DCGD).

    direction = (1/n) sum_i C_i(g_i).

    With an unbiased C it converges to a neighbourhood whose size grows with omega and with the
    disagreement of the workers' gradients at the optimum; `diana` removes it. With a biased C
    that loses much (top_k) it need not converge at all: use `error_feedback`. Gradients are sent
    in their own dtype.

    Args:
        compressor: of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.

    Raises:
        ValueError: neither omega nor alpha of the compressor is known.

    Reference: Khirirat, Feyzmahdavian, Johansson 2018.

    >>> import jaxcomp as jc
    >>> jc.direct(jc.dithering(7)).roles
    {'compressor': 'compressor'}
    """
    check_bounded("direct", compressor)

    def init(here, like):
        return DirectState(here.start(like))

    def update(here, grads, state):
        sent = yield here.mean(grads, state.compressor)
        return sent.direction, DirectState(sent.states)

    return Algorithm(init, update, {"compressor": "compressor"}, compressor)


def check_bounded(name: str, compressor: Compressor) -> Spec:
    """The spec of a compressor; ValueError unless its omega or its alpha is known."""
    spec = check_compressor(name, compressor)
    if spec.omega is None and spec.alpha is None:
        raise ValueError(
            f"{name} needs a compressor with a known error bound (omega or alpha); {spec.name} has none. "
            f"{spec.remedy or ''}".rstrip()
        )
    return spec
