"""The parallel backend: mesh, shards, ring, stages, reduction, checkpoints."""
