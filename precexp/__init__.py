"""precexp: the referee for training precision."""

__version__ = "0.1.0"
