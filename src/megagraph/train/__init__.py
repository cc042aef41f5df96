"""The training loop shared by all systems."""
