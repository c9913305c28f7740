"""Drop-in collectives: `lax.pmean` and `lax.psum_scatter` with a chosen format on the wire and sums in f32."""

from jaxcomp.exchange.reduce import pmean, psum_scatter

__all__ = ["pmean", "psum_scatter"]
