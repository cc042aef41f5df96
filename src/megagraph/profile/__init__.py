"""Measurements of compute, communication and memory."""
