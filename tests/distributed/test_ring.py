"""Sharded attention against the written-out truth: ranks, ragged and empty shards, super nodes, stores, exchanges.

Many cases share one launch of the ranks. Every rank compares its own rows; what is replicated is summed first.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megagraph.attention.bias import DenseBias
from megagraph.attention.codes import CodeBias
from megagraph.attention.dropout import AttentionDropout
from megagraph.attention.sparse import SparseBias
from megagraph.config import ParallelPlan, UserError
from megagraph.parallel.heads import all_to_all_attention, check_heads
from megagraph.parallel.mesh import make_mesh, process_group
from megagraph.parallel.ring import Ring, ring_attention
from megagraph.parallel.shard import shard_sizes, shard_slice

pytestmark = pytest.mark.distributed

M, D = 3, 8
STORES = {"dense": DenseBias.full, "code": CodeBias.from_dense, "sparse": SparseBias.from_dense}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One attention; `readout` limits the queries to that many first tokens."""

    regular: int
    supers: int
    store: str = "dense"
    rate: float = 0.0
    exchange: str = "ring"
    dtype: torch.dtype = torch.float64
    readout: int | None = None
    heads: int = 2


def cases(num_ranks):
    """The numerics table for one number of ranks; the second size leaves ranks without regular tokens."""
    shapes = [(13, 0), (13, 1), (13, 17), (num_ranks - 1, 1), (num_ranks - 1, 17), (1, 0)]
    every = [Case(*shape, store, rate, "ring") for shape, store, rate in product(shapes, STORES, (0.0, 0.3))]
    every += [replace(case, exchange="allgather") for case in every if case.store != "code"]
    every += [Case(*shape, "dense", rate, "all_to_all", heads=num_ranks) for shape, rate in product(shapes, (0.0, 0.3))]
    every += [Case(13, 3, "sparse", 0.3, exchange, readout=1) for exchange in ("ring", "allgather")]
    for exchange, dtype in product(("ring", "allgather", "all_to_all"), (torch.float32, torch.bfloat16)):
        every.append(Case(29, 4, "dense", 0.3, exchange, dtype, heads=num_ranks))
    return every


def problem(case):
    """Global inputs in float64 (rounded to the case's type), as every rank makes them."""
    generator = torch.Generator().manual_seed(case.regular + 100 * case.supers)
    N, g = case.regular + case.supers, min(1, case.supers)
    vectors = torch.rand(4, M, generator=generator, dtype=torch.float64)
    vectors[0] = 0
    code = (torch.rand(2, N, N, generator=generator) * 8).long().sub_(4).clamp_(min=0)
    channels = vectors[code].permute(0, 3, 1, 2).contiguous()
    if g:
        channels[:, :, N - g :] = 0
        channels[..., N - g :] = 0
    shapes = [(2, case.heads, N, D)] * 4 + [(case.heads, M + g)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    rounded = [t.to(case.dtype).double() for t in (*tensors, channels)]
    return (*rounded, g)


def dropout_of(case, rows):
    columns = torch.arange(case.regular + case.supers)
    return AttentionDropout(case.rate, 7, torch.arange(2), rows, columns) if case.rate else None


def truth(case):
    """Output and gradients (q, k, v, weight); dout counts only the rows that are read out."""
    q, k, v, dout, weight, channels, g = problem(case)
    N = q.shape[2]
    leaves = [t.requires_grad_() for t in (q, k, v, weight)]
    bias = torch.einsum("hm,bmij->bhij", weight[:, :M], channels)
    if g:
        last = torch.arange(N) == N - 1
        bias = bias + torch.where(last | last[:, None], weight[:, M, None, None], 0.0)
    p = (q @ k.transpose(2, 3) / D**0.5 + bias).softmax(-1)
    if case.rate:
        p = p * dropout_of(case, torch.arange(N)).keep(case.heads, slice(0, 2), slice(0, N)) / (1 - case.rate)
    out = p @ v
    if case.readout is not None:
        dout = dout * (torch.arange(N) < case.readout)[:, None]
    return out.detach(), torch.autograd.grad(out, leaves, dout)


def attend_of(case, channels, g, group, sizes):
    rows = shard_slice(case.regular, len(sizes), dist.get_rank(group))
    local = torch.cat([channels[:, :, rows], channels[:, :, case.regular :]], 2).to(case.dtype).contiguous()
    store, num_tokens = STORES[case.store](local, g), case.regular + case.supers
    if case.exchange == "all_to_all":
        return all_to_all_attention(store, sizes, num_tokens, group)
    return ring_attention(store, sizes, num_tokens, Ring(group), case.exchange)


def worst_error(case, group, num_ranks):
    q, k, v, dout, weight, channels, g = problem(case)
    rank, sizes = dist.get_rank(group), shard_sizes(case.regular, num_ranks)
    rows = shard_slice(case.regular, num_ranks, rank)
    mine = torch.cat([torch.arange(rows.start, rows.stop), torch.arange(case.regular, q.shape[2])])
    readout = len(mine) if case.readout is None else max(0, min(case.readout, rows.stop) - rows.start)
    queries = mine[:readout]
    parts = (q[:, :, queries], k[:, :, mine], v[:, :, mine], weight)
    leaves = [t.to(case.dtype).requires_grad_() for t in parts]
    out = attend_of(case, channels, g, group, sizes)(*leaves, dropout_of(case, mine))
    share = dout.clone()
    share[:, :, case.regular :] /= num_ranks  # a super node counts once over all ranks
    grads = torch.autograd.grad(out, leaves, share[:, :, queries].to(case.dtype))
    true_out, true_grads = truth(case)
    pairs = [(out, true_out[:, :, queries])]
    for got, want in zip(grads[:3], true_grads[:3], strict=True):
        full = torch.zeros_like(want)
        full[:, :, mine[: got.shape[2]]] = got.double()
        dist.all_reduce(full, group=group)
        pairs.append((full, want))
    dweight = grads[3].double()
    dist.all_reduce(dweight, group=group)
    pairs.append((dweight, true_grads[3]))
    return max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs if b.numel())


def rank_errors(num_ranks):
    plan = ParallelPlan(cp=num_ranks, layers=(1,))
    with process_group(num_ranks, "cpu", 60.0):
        group = make_mesh(plan, "cpu", 60.0).group("cp")
        return [worst_error(case, group, num_ranks) for case in cases(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sharded_attention_equals_truth(run_ranks, num_ranks):
    for errors in run_ranks(num_ranks, rank_errors, num_ranks):
        wrong = {
            case: error
            for case, error in zip(cases(num_ranks), errors, strict=True)
            if not error <= TOLERANCE[case.dtype]
        }
        assert not wrong


def test_heads_have_to_divide():
    check_heads(8, 4)
    with pytest.raises(UserError, match="heads=8 do not divide over cp=3"):
        check_heads(8, 3)
