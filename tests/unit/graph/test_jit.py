"""What a first run compiles: each kernel of the default path once, and no library code along with it."""

import json
import os
import subprocess
import sys

BUILD = """
import json
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, happened):
        function = happened.data["dispatcher"].py_func
        compiled.append(function.__module__ + "." + function.__name__)
    def on_end(self, happened):
        pass
event.register("numba:compile", Listener())
import numpy as np
from megagraph.config import CoarseningConfig, PlantedConfig, SamplingConfig
from megagraph.graph.batch import EgoBuilder
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
graph = planted("planted", PlantedConfig(source="planted", nodes=300))
coarsening = coarsen(graph, CoarseningConfig())
for powers in ("global", "induced"):
    sampling = SamplingConfig(powers=powers)
    builder = EgoBuilder(graph, coarsening, sampling, bias_channels=4, global_tokens=1, seed=0)
    builder.build(np.arange(8), stream=0, samples=2)
print(json.dumps(compiled))
"""


def test_first_batches_compile_each_kernel_once_and_nothing_of_the_library(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BUILD]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    compiled = json.loads(result.stdout.strip().splitlines()[-1])
    assert "megagraph.graph.pagerank._push_rows" in compiled and "megagraph.graph.induced._fill_induced" in compiled
    assert len(set(compiled)) == len(compiled) <= 13
    assert all(name.startswith("megagraph.graph.") for name in compiled), compiled
