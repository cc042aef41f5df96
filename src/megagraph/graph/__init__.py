"""Graphs on disk and in memory: download, coarsening, sampling, batches."""
