"""What every test shares: one thread per process, and the reason why a test that needs real graphs is skipped."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere: tests run beside each other

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    if os.environ.get("MEGAGRAPH_MIRROR"):
        return
    skip = pytest.mark.skip(reason="MEGAGRAPH_MIRROR names no folder with the public graphs")
    for item in items:
        if "mirror" in item.keywords:
            item.add_marker(skip)
