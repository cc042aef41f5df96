"""The table of learned node rows: its gradient is that of a plain look-up, its values depend on nothing but the row."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from megagraph.attention.scope import DistinctRows, Scope
from megagraph.config import ModelConfig
from megagraph.model.hierarchical import HierarchicalGT
from megagraph.model.initialise import initialise
from megagraph.model.nodes import BLOCK, AllRows, NodeTable

CONFIG = ModelConfig(layers=1, hidden=8, ffn=8, heads=2, node_embedding=True)
NUM_NODES, NUM_ROWS = 20, 26


def build():
    features = torch.randn(NUM_ROWS, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = HierarchicalGT(CONFIG, features, 3, nodes=NodeTable(8, AllRows(NUM_NODES))).double()
    initialise(model, 1, 1)
    return model.embed


def test_rows_are_added_to_real_nodes_with_the_gradient_of_a_plain_look_up():
    embed = build()
    plain = embed.nodes.weight.detach().clone().requires_grad_()
    tokens = torch.arange(5)
    loss = 0
    for step in range(2):  # gradients of micro-batches add up
        ids = torch.randint(0, NUM_ROWS, (6, 4), generator=torch.Generator().manual_seed(step))
        upstream = torch.randn(6, 5, 8, dtype=torch.float64)
        scope = Scope(None, torch.arange(6), tokens, tokens, 1)
        x = embed(ids, scope)
        learned = torch.cat([plain, torch.zeros(NUM_ROWS - NUM_NODES, 8, dtype=torch.float64)])
        with torch.no_grad():
            projected = embed.project(embed.features[ids])
        truth = torch.cat([projected + functional.embedding(ids, learned), embed.global_tokens.expand(6, -1, -1)], 1)
        assert (x - truth).abs().max() <= 1e-14
        distinct, places = DistinctRows.of(ids, NUM_NODES)
        listed = embed(places, Scope(None, torch.arange(6), tokens, tokens, 1, distinct=distinct))
        assert torch.equal(x, listed)
        listed.backward(upstream)
        loss = loss + (truth * upstream).sum()
    loss.backward()
    assert plain.grad.abs().max() > 0.1
    assert (embed.nodes.weight.grad - plain.grad).abs().max() <= 1e-12


@dataclass(frozen=True)
class SomeRows:
    """Rows held by one rank; nothing is looked up."""

    num_rows: int
    held: range


def test_initial_rows_do_not_depend_on_where_they_are_held():
    whole = NodeTable(4, AllRows(3 * BLOCK + 7))
    whole.requires_grad_(False).initialise(5, 0.02)
    assert abs(whole.weight.std().item() - 0.02) < 1e-3
    for held in (range(0, 10), range(BLOCK - 3, 2 * BLOCK + 9), range(3 * BLOCK + 2, 3 * BLOCK + 7), range(7, 7)):
        part = NodeTable(4, SomeRows(3 * BLOCK + 7, held))
        part.requires_grad_(False).initialise(5, 0.02)
        assert torch.equal(part.weight, whole.weight[held.start : held.stop])
    assert not torch.equal(whole.weight[:BLOCK], whole.weight[BLOCK : 2 * BLOCK])
