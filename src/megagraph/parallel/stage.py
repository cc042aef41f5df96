"""One rank's pipeline stage on torch.distributed.pipelining, with static shapes.

Only activations cross stages. Everything else a micro-batch needs (bias, labels, dropout keys) is looked up by its
number on the rank that uses it: extra tensors given to the schedule would be re-split, or sent.

Shapes: K micro-batches of b sequences, T local tokens without global ones, S local tokens, D hidden, R local
read-out tokens, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from megagraph.attention.bias import BiasStore
from megagraph.attention.precision import low_precision
from megagraph.attention.scope import Scope
from megagraph.parallel.mesh import Mesh


@dataclass(frozen=True)
class Microbatch:
    """What one rank holds of a micro-batch; labels and weights of the local read-out tokens only.

    `ids_BT` are rows of the feature table, or places in `scope.distinct`.
    """

    ids_BT: Tensor
    scope: Scope
    labels_BR: Tensor
    weight_BR: Tensor
    bias: BiasStore

    def tensors(self) -> list[Tensor]:
        """Everything that is held for the micro-batch until its step is over."""
        rows = [] if self.scope.distinct is None else [self.scope.distinct.rows_U]
        return [self.ids_BT, self.labels_BR, self.weight_BR, self.scope.sequence_B, *rows, *self.bias.tensors()]


@dataclass(frozen=True)
class StageShape:
    """Sizes that a schedule fixes beside the number of sequences; gloo accepts wrong ones in silence.

    `dtype` is that of weights, residual stream and logits; with `autocast` layers compute in that type, and activations
    and their gradients cross stages in it.
    """

    num_ids: int
    num_local: int
    num_readout: int
    hidden: int
    num_classes: int
    dtype: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def message_dtype(self) -> torch.dtype:
        """Type of what crosses stages."""
        return self.autocast or self.dtype


def _value(number: Tensor) -> int:
    """The number of a micro-batch. A fake one holds none, but is a view into arange(K), at the place of its value."""
    return int(number.storage_offset() if isinstance(number, FakeTensor) else number)


class _NumberedStage(nn.Module):
    """The model, finding the scope of a micro-batch by its number; its input and output are of the schedule's types."""

    def __init__(self, model: nn.Module, shape: StageShape, device_type: str, last: bool) -> None:
        super().__init__()
        self.model = model
        self.microbatches: list[Microbatch] = []
        self._shape = shape
        self._device_type = device_type
        self._output = shape.dtype if last else shape.message_dtype

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        if x.is_floating_point():
            x = x.to(self._shape.dtype)
        with low_precision(self._device_type, self._shape.autocast):
            out: Tensor = self.model(x, self.microbatches[_value(number)].scope)
        return out.to(self._output)


class Pipeline:
    """Runs training steps of a stage under the plan's schedule (the paper's is GPipe, III-A2), and predictions."""

    def __init__(self, model: nn.Module, mesh: Mesh, shape: StageShape) -> None:
        self._stage_module = _NumberedStage(model, shape, mesh.device.type, mesh.is_last_stage)
        self._mesh = mesh
        self._shape = shape
        self._normaliser = 1.0
        self._schedules: dict[tuple[int, int, bool], ScheduleGPipe | Schedule1F1B] = {}

    @property
    def module(self) -> nn.Module:
        """The module that the schedule calls, once per micro-batch: where timers hook."""
        return self._stage_module

    def train_step(self, microbatches: list[Microbatch], normaliser: float) -> Tensor:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters.

        Args:
            microbatches: K of equal shape.
            normaliser: read-out tokens of the whole step over all replicas.

        Returns:
            This rank's share of the loss (zero away from the last stage); the step's loss is its sum over ranks.
        """
        self._normaliser = normaliser
        losses: list[Tensor] = []
        numbers = torch.arange(len(microbatches))
        target = numbers if self._mesh.is_last_stage else None
        schedule = self._schedule(microbatches, training=True)
        collected = losses if self._mesh.is_last_stage else None
        with self._one_cast():
            schedule.step(
                *self._inputs(microbatches), target=target, losses=collected, number=numbers, return_outputs=False
            )
        self._stage_module.microbatches = []
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=self._shape.dtype)

    @torch.no_grad()
    def predict(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Logits [K*b, R, C] of the local read-out tokens on the last stage, None elsewhere."""
        schedule = self._schedule(microbatches, training=False)
        with self._one_cast():
            logits = schedule.step(*self._inputs(microbatches), number=torch.arange(len(microbatches)))
        self._stage_module.microbatches = []
        return logits if self._mesh.is_last_stage else None

    def _one_cast(self) -> torch.autocast:
        """Around all micro-batches: autocast keeps its copies of the weights until the outermost context ends."""
        return low_precision(self._mesh.device.type, None)

    def _inputs(self, microbatches: list[Microbatch]) -> tuple[Tensor, ...]:
        self._stage_module.microbatches = microbatches
        return (torch.cat([m.ids_BT for m in microbatches]),) if self._mesh.is_first_stage else ()

    def _loss(self, logits_BRC: Tensor, number: Tensor) -> Tensor:
        microbatch = self._stage_module.microbatches[_value(number)]
        loss_N = functional.cross_entropy(logits_BRC.flatten(0, 1), microbatch.labels_BR.flatten(), reduction="none")
        return (loss_N * microbatch.weight_BR.flatten()).sum() / self._normaliser

    def _schedule(self, microbatches: list[Microbatch], training: bool) -> ScheduleGPipe | Schedule1F1B:
        """The cached schedule of this micro-batch shape; raises if the shapes are not those it was built for."""
        shape, sequences = self._shape, microbatches[0].ids_BT.shape[0]
        for microbatch in microbatches:
            if tuple(microbatch.ids_BT.shape) != (sequences, shape.num_ids):
                raise ValueError(
                    f"micro-batch ids {tuple(microbatch.ids_BT.shape)} do not match the stage's "
                    f"({sequences}, {shape.num_ids}): shard and pad the batch first"
                )
        key = len(microbatches), sequences, training
        if key not in self._schedules:
            stage = PipelineStage(
                self._stage_module,
                self._mesh.index("pp"),
                self._mesh.plan.pp,
                self._mesh.device,
                input_args=self._example_input(sequences, training),
                output_args=self._example_output(sequences, training),
                group=self._mesh.group("pp"),
            )
            loss = self._loss if training else None
            # Predictions are all forwards, whatever the plan: the schedules differ in when backward runs.
            kind = Schedule1F1B if training and self._mesh.plan.schedule == "1f1b" else ScheduleGPipe
            self._schedules[key] = kind(stage, len(microbatches), loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def _example_input(self, sequences: int, training: bool) -> Tensor:
        shape = self._shape
        if self._mesh.is_first_stage:
            return torch.empty(sequences, shape.num_ids, dtype=torch.int64, device="meta")
        return self._tokens(sequences, training)

    def _example_output(self, sequences: int, training: bool) -> Tensor:
        shape = self._shape
        if not self._mesh.is_last_stage:
            return self._tokens(sequences, training)
        size = sequences, shape.num_readout, shape.num_classes
        return torch.empty(size, dtype=shape.dtype, device="meta", requires_grad=training)

    def _tokens(self, sequences: int, training: bool) -> Tensor:
        # Static gradient buffers are derived from requires_grad of the examples: without it backward has no input.
        size = sequences, self._shape.num_local, self._shape.hidden
        return torch.empty(size, dtype=self._shape.message_dtype, device="meta", requires_grad=training)
