"""What precision loses: warnings that arithmetic proves before a run, probes while it trains."""

from precexp.numerics.probes import NoProbes, Probes, Probing, build_probes
from precexp.numerics.warnings import LossWarning, typical_weight, warnings_of

__all__ = [
    "LossWarning",
    "NoProbes",
    "Probes",
    "Probing",
    "build_probes",
    "typical_weight",
    "warnings_of",
]
