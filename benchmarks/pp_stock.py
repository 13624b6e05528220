"""Train the small decoder of pp_traced.py in torch's own pipeline, and note what is alive.

Torch's pipeline is `PipelineStage` with the schedule classes of `torch.distributed.pipelining`.
`pp_memory.py` compares `run_stock` with `pp_traced.run_ours`; `pp_gradients.py` and
`pp_torch_stages.py` import `StockStage`.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.pp_traced import (
    Storages,
    TracedStep,
    count_forwards,
    list_gradients,
    make_micro_batches,
)
from recipe_lib.config.mesh import count_stages, list_rank_stages
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import Decoder, DecoderSpec, build_meta, init_weights

# Value of parallel.pipeline_schedule -> torch's class. The first two take one stage, the others a
# list.
SCHEDULE_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class StockStage(nn.Module):
    """A stage of our decoder as torch wants it, from hidden states to hidden states `[b, s, d]`.

    The first takes tokens `[b, s]` instead, the last returns logits `[b, s, vocabulary]`.
    """

    def __init__(self, model: Decoder, layers: range, stage: int, stages: int) -> None:
        """Take from a whole model, in place, what is not this stage's. stages: how many."""
        super().__init__()
        self.model = model
        self.layers = layers
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        trunk = model.model
        # Through `_modules`, so that the layers that stay keep their numbers as names.
        layer_names = {str(number) for number in layers}
        for name in [name for name in trunk.layers._modules if name not in layer_names]:
            del trunk.layers._modules[name]
        if not self.is_first:
            trunk.embed_tokens = None  # type: ignore[assignment]
        if not self.is_last:
            trunk.norm = model.lm_head = None  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the stage on a micro-batch."""
        trunk = self.model.model
        shape = hidden.shape[:2]
        if self.is_first:
            hidden = trunk.embed_tokens(hidden)
        hidden = trunk.run_layers(
            hidden, shape=shape, positions=None, info=None, layers=self.layers
        )
        return F.linear(trunk.norm(hidden), self.model.lm_head.weight) if self.is_last else hidden


def run_stock(cfg: FullFinetuneConfig, spec: DecoderSpec, count: int, rank: int) -> TracedStep:
    """Measure a rank's second step; `held`, the bytes after each action, stays empty.

    The last stage makes logits of all tokens in forward. count: micro-batches of a step. rank: the
    place in the pipeline.
    """
    num_stages = count_stages(cfg.parallel)
    rank_stages = list_rank_stages(cfg.parallel, rank)
    modules = [
        _build_stage(cfg, spec=spec, stage=stage, num_stages=num_stages) for stage in rank_stages
    ]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    stages = [
        PipelineStage(module, stage_index=stage, num_stages=num_stages, device=torch.device("cpu"))
        for stage, module in zip(rank_stages, modules, strict=True)
    ]
    takes_one_stage = cfg.parallel.pipeline_schedule in ("gpipe", "1f1b")
    schedule = SCHEDULE_CLASSES[cfg.parallel.pipeline_schedule](
        stages[0] if takes_one_stage else stages,
        n_microbatches=count,
        loss_fn=_compute_loss,
        scale_grads=False,
    )
    traced = TracedStep()
    calls = Counter[str]()
    for module in modules:
        count_forwards(module.model, calls)
    batches = make_micro_batches(count)
    # torch's schedule takes the whole batch and splits it; the first stage has the tokens, the last
    # the labels.
    inputs = [torch.cat([batch.tokens for batch in batches])] if 0 in rank_stages else []
    targets: dict[str, Any] = {}
    if num_stages - 1 in rank_stages:
        targets["target"] = torch.cat([batch.labels for batch in batches])
    # As `pp_traced.run_ours` measures: gradients are not counted, and the second step is kept.
    storages = Storages(peaks=True)
    storages.list_ignored = lambda: list_gradients(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for _ in range(2):
        calls.clear()
        storages.peak = 0
        with storages:
            schedule.step(*inputs, return_outputs=False, **targets)
            traced.alive_after_step = sum(storages.measure_alive().values())
        traced.peak = storages.peak
        traced.first_forwards = traced.forwards
        traced.forwards = dict(calls)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return traced


def _build_stage(
    cfg: FullFinetuneConfig, spec: DecoderSpec, stage: int, num_stages: int
) -> StockStage:
    """Return a stage with the weights of the whole model's init; layers are shared out evenly."""
    stage_layers = spec.num_layers // num_stages
    layers = range(stage * stage_layers, (stage + 1) * stage_layers)
    model = build_meta(spec, torch.float32)
    part = StockStage(model, layers=layers, stage=stage, stages=num_stages)
    apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
    model.to_empty(device="cpu")
    init_weights(model, 1, spec)
    return part


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch over 100, as `pp_traced` takes it."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100
