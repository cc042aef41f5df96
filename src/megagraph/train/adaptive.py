"""Rewards of the sampling heuristics from the attention of the last layer, under any layout (ans-gt 2.6, 3).

Shapes: B sequences, H heads, S local tokens, N tokens, D features per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph.attention.bias import BiasStore
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.kernel import compute_dtype
from megagraph.attention.slot import Attend
from megagraph.graph.adaptive import rewards
from megagraph.parallel.shard import shard_sizes
from megagraph.parallel.stage import Microbatch
from megagraph.train.engine import Engine
from megagraph.train.evaluate import even_capacity

REWARD_STREAM = -2
REWARDED_BY_ANSGT = 9


class ScoreProbe:
    """An attention slot that notes the scores of token 0 in the stage's last layer, and attends as before.

    score_j = mean over heads of softmax[0, j] * ||v_j||, without dropout, [B, N] on the rank that holds token 0. Keys
    of the other cp ranks are gathered; every rank of the group takes part.
    """

    def __init__(self, engine: Engine, attend: Attend, bias: BiasStore) -> None:
        self._engine, self._attend, self._bias = engine, attend, bias
        self._left = len(engine.model.layers)
        self.scores_BN: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, dropout: AttentionDropout | None) -> Tensor:
        """Fill the attention slot."""
        self._left -= 1
        if self._left == 0:
            dtype = compute_dtype(q.dtype)
            keys, norms = self._everyone(k).to(dtype), self._everyone(v.to(dtype).norm(dim=-1, keepdim=True))
            if self._engine.mesh.index("cp") == 0:
                scores = torch.empty(*q.shape[:2], 1, keys.shape[2], dtype=dtype, device=q.device)
                self._bias.write(scores, weight, slice(0, len(q)), slice(0, 1))
                scores += q[:, :, :1].to(dtype) @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
                self.scores_BN = (scores.softmax(-1) * norms.transpose(2, 3)).mean(1)[:, 0]
        return self._attend(q, k, v, weight, dropout)

    def _everyone(self, x_BHSD: Tensor) -> Tensor:
        """Regular tokens of all cp ranks in order, then the super nodes, which every rank holds."""
        mesh, layout = self._engine.mesh, self._engine.layout
        if mesh.plan.cp == 1:
            return x_BHSD
        sizes = shard_sizes(layout.num_regular, mesh.plan.cp)
        own = sizes[mesh.index("cp")]
        B, H, _, D = x_BHSD.shape
        padded = x_BHSD.new_zeros(B, H, max(sizes), D)
        padded[:, :, :own] = x_BHSD[:, :, :own]
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=mesh.group("cp"))
        regular = [part[:, :, :size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat([*regular, x_BHSD[:, :, own:]], 2)


def heuristic_rewards(
    engine: Engine, nodes: NDArray[np.int64], shares_H: NDArray[np.float64], most: int
) -> NDArray[np.float64]:
    """The mean reward of each heuristic over `nodes` (r_h of ans-gt 3), the same on every rank.

    Their sequences, `eval_samples` each, are drawn with the builder's present shares, which `shares_H` are too, so the
    importance weights are right. `most` bounds the centres per step.
    """
    mesh, sampling = engine.mesh, engine.config.sampling
    samples, plan = sampling.eval_samples, mesh.plan
    num_rewarded = REWARDED_BY_ANSGT if sampling.compat == "ansgt" else sampling.num_sampled
    capacity = even_capacity(len(nodes), max(most, plan.dp * plan.microbatches))
    total_H = np.zeros(len(shares_H))
    for start in range(0, len(nodes), capacity):
        chunk = nodes[start : start + capacity]
        microbatches = engine.microbatches(chunk, capacity, REWARD_STREAM, samples, None)
        scores_BN = _scores(engine, microbatches)
        if scores_BN is None:
            continue
        centres = engine.share(chunk, capacity, samples).nodes_KB.reshape(-1)
        real_B = np.repeat(centres >= 0, samples)
        tokens_BN = engine.builder.regular_nodes(centres, stream=REWARD_STREAM, samples=samples)[real_B]
        width = 1 + min(num_rewarded, sampling.num_sampled)
        drawn = (tokens_BN[:, :width], scores_BN[real_B, :width])
        total_H += rewards(engine.builder.source, shares_H, *drawn).sum(0) / samples
    total = torch.from_numpy(total_H).to(mesh.device)
    dist.all_reduce(total)
    return total.cpu().numpy() / max(1, len(nodes))


def _scores(engine: Engine, microbatches: Sequence[Microbatch]) -> NDArray[np.float64] | None:
    """Scores [K*b, N] of the step's sequences on the rank of the last stage that holds their centres, else None."""
    mesh = engine.mesh
    probes: list[ScoreProbe] = []
    watched = []
    for microbatch in microbatches:
        scope = microbatch.scope
        if mesh.is_last_stage:
            probes.append(ScoreProbe(engine, scope.attend, microbatch.bias))
            scope = replace(scope, attend=probes[-1])
        watched.append(replace(microbatch, scope=scope))
    engine.pipeline.predict(watched)
    if not probes or mesh.index("cp") != 0:
        return None
    return torch.cat([probe.scores_BN for probe in probes if probe.scores_BN is not None]).double().cpu().numpy()
