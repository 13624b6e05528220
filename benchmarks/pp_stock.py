"""The same small decoder through torch's own pipeline: PipelineStage and the Schedule classes. Used
by pp_memory.py.
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

from benchmarks.pp_traced import Storages, Traced, count_forwards, make_micro_batches
from recipe_lib.config.mesh import count_stages, list_rank_stages
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import Decoder, DecoderSpec, build_meta, init_weights

SCHEDULE_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """A stage as torch wants it: tokens or hidden states to hidden states, the last one's to
    logits.
    """

    def __init__(self, model: Decoder, layers: range, stage: int, stages: int) -> None:
        super().__init__()
        self.model, self.layers, self.is_first, self.is_last = (
            model,
            layers,
            stage == 0,
            stage == stages - 1,
        )
        trunk = model.model
        kept = {str(number) for number in layers}
        for name in [name for name in trunk.layers._modules if name not in kept]:
            del trunk.layers._modules[name]
        if not self.is_first:
            trunk.embed_tokens = None  # type: ignore[assignment]
        if not self.is_last:
            trunk.norm = model.lm_head = None  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        trunk = self.model.model
        shape = hidden.shape[:2]
        if self.is_first:
            hidden = trunk.embed_tokens(hidden)
        hidden = trunk.run_layers(hidden, shape, None, None, layers=self.layers)
        return F.linear(trunk.norm(hidden), self.model.lm_head.weight) if self.is_last else hidden


def run_stock(cfg: FullFinetuneConfig, spec: DecoderSpec, count: int, rank: int) -> Traced:
    """A rank's second step, traced; `held` stays empty. The loss is that of whole logits, made in
    forward.
    """
    stages = count_stages(cfg.parallel)
    each, mine = spec.num_layers // stages, list_rank_stages(cfg.parallel, rank)
    parts = [
        _build_stage(cfg, spec, stage, range(stage * each, (stage + 1) * each), stages)
        for stage in mine
    ]
    parameters = [parameter for _, part in parts for parameter in part.parameters()]
    wrapped = [PipelineStage(part, stage, stages, torch.device("cpu")) for stage, part in parts]
    make = SCHEDULE_CLASSES[cfg.parallel.pipeline_schedule]
    alone = cfg.parallel.pipeline_schedule in ("gpipe", "1f1b")
    schedule = make(
        wrapped[0] if alone else wrapped,
        n_microbatches=count,
        loss_fn=_compute_loss,
        scale_grads=False,
    )
    found, calls = Traced(), Counter[str]()
    for _, part in parts:
        count_forwards(part.model, calls)
    rows = make_micro_batches(count)
    tokens, labels = (
        torch.cat([one.tokens for one in rows]),
        torch.cat([one.labels for one in rows]),
    )
    storages = Storages(peaks=True)
    storages.ignored = lambda: [one.grad for one in parameters if one.grad is not None]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for _ in range(2):
        calls.clear()
        storages.most = 0
        with storages:
            more: dict[str, Any] = {"target": labels} if stages - 1 in mine else {}
            schedule.step(*([tokens] if 0 in mine else []), return_outputs=False, **more)
            found.left = sum(storages.alive().values())
        found.most, found.first, found.forwards = storages.most, found.forwards, dict(calls)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def _build_stage(
    cfg: FullFinetuneConfig, spec: DecoderSpec, stage: int, layers: range, stages: int
) -> tuple[int, Part]:
    model = build_meta(spec, torch.float32)
    part = Part(model, layers, stage, stages)
    apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
    model.to_empty(device="cpu")
    init_weights(model, 1, spec)
    return stage, part


def _compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100
