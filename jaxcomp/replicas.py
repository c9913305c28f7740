"""Are all workers still the same? Fingerprints of what should be equal, and steps that are skipped by all or none."""

from jaxcomp.exchange.replicas import ReplicaDrift, check_replicas, fingerprint, fingerprints, skip_nonfinite

__all__ = ["ReplicaDrift", "check_replicas", "fingerprint", "fingerprints", "skip_nonfinite"]
