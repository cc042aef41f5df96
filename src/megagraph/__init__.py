"""MegaGraph: training of large-scale graph transformers with automated hybrid parallelism."""

__version__ = "0.1.0"
