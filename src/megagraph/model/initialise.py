"""Initial weights as a pure function of (seed, parameter name): every layout starts from the same model."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from megagraph.attention.dropout import fold
from megagraph.model.nodes import NodeTable


def initialise(model: nn.Module, seed: int, num_layers: int) -> None:
    """Linear weights N(0, (0.02/sqrt(L))^2) and zero biases, embeddings N(0, 0.02^2), norms at one (`ans-gt.md` 2.4).

    `num_layers` is L of the whole model, also when `model` is one pipeline stage of it.
    """
    linear_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    norm_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}
    tables = {id(m.weight): m for m in model.modules() if isinstance(m, NodeTable)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in tables:
                tables[id(parameter)].initialise(fold(seed, zlib.crc32(name.encode())), 0.02)
            elif id(parameter) in norm_weights:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = 0.02 / num_layers**0.5 if id(parameter) in linear_weights else 0.02
                generator = torch.Generator().manual_seed(fold(seed, zlib.crc32(name.encode())))
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
                parameter.copy_(values)
