"""Full fine-tuning of a decoder, on one process or many: every parameter is trained.

    tune run full_finetune_distributed --config demo/full                                    # one process
    tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
    torchrun --nproc_per_node 4 recipes/full_finetune_distributed.py --config llama3/8B_full  # without the CLI

Per rank it holds (parameters + gradients + optimizer states) / ranks, the units that FSDP has gathered at the
moment, and what the layers keep for backward. The levers, in the order in which they are usually pulled:

    batch_size=1                            fewer rows a micro-batch; gradient_accumulation_steps keeps the global batch
    memory.activation_checkpointing=full    keep layer inputs only, compute the rest again in backward
    parallel.wrapping=memory_efficient      embedding and output gathered one at a time, not throughout the step
    memory.loss_chunks=16                   logits of a sixteenth of the tokens at a time
    memory.cpu_offload=true                 parameters, gradients and states in host memory

To change the recipe: `tune cp full_finetune_distributed mine.py`, edit, `tune run mine.py --config ...`.
"""

import sys
import time
from dataclasses import dataclass

import torch

from recipe_lib.checkpoint.huggingface import check_weights, export_model, find_checkpoint, load_weights
from recipe_lib.checkpoint.state import find_state, load_state, save_state
from recipe_lib.config import FullFinetuneConfig, parse_arguments
from recipe_lib.data import StepBatches, build_dataset, check_vocabulary, make_step, steps_per_epoch, validation_steps
from recipe_lib.errors import exit_code_of
from recipe_lib.memory import PeakMemory, apply_activation_checkpointing
from recipe_lib.models import build_meta, init_weights, preset_config, read_config, spec_from_config
from recipe_lib.parallel import World, compile_layers, materialize, shard_model, start_world
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training import (
    RunLog,
    StopSignal,
    build_optimizer,
    clip_grad_norm,
    describe_run,
    explain_out_of_memory,
    learning_rate,
    prepare_output,
    set_learning_rate,
    set_seeds,
)

Config = FullFinetuneConfig


@dataclass
class Step:
    """What one optimizer step leaves behind, on the device: mean loss of the trained tokens, gradient norm."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


class FullFinetune:
    """Trains every parameter. `world`: this process's rank, device and mesh."""

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world, self.device = cfg, world, world.device
        self.dtype = DTYPES[cfg.dtype]
        self.step = 0  # optimizer steps done

        # The shape of the model, from the checkpoint's config.json or from a preset; weights are checked by their
        # headers now, so that a broken folder is noticed before data is read or memory taken.
        self.folder = find_checkpoint(cfg.model.path) if cfg.model.path else None
        self.model_config = read_config(self.folder) if self.folder else preset_config(cfg.model.preset)
        self.spec = spec_from_config(self.model_config, where=str(self.folder or cfg.model.preset))
        if self.folder:
            check_weights(self.spec, self.folder)

    def setup_data(self) -> None:
        """Rows as tokens and labels; which rows a step takes is computed from (seed, epoch, step)."""
        cfg = self.cfg
        self.tokenizer = load_tokenizer(cfg.tokenizer.path or self.folder, cfg.tokenizer.chat_template)
        check_vocabulary(self.tokenizer, self.spec.vocab_size)
        self.dataset = build_dataset(cfg.data, self.tokenizer, cfg.max_seq_len)
        self.validation = None
        if cfg.validation.source:
            self.validation = build_validation_dataset(cfg, self.tokenizer)
        self.global_rows = cfg.batch_size * cfg.gradient_accumulation_steps * self.world.data_ranks
        self.epoch_steps = steps_per_epoch(len(self.dataset), self.global_rows)
        self.total_steps = min(self.epoch_steps * cfg.epochs, cfg.max_steps or sys.maxsize)

    def setup_model(self) -> None:
        """The model, transformed in the order in which memory is taken; no weights yet."""
        cfg = self.cfg
        self.model = build_meta(self.spec, self.dtype)
        apply_activation_checkpointing(self.model, cfg.memory.activation_checkpointing)
        if cfg.compile:
            compile_layers(self.model)
        shard_model(self.model, cfg.parallel, cfg.memory, self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Each rank reads its own slices of the checkpoint, or draws its own part of the random start."""
        if self.folder:
            load_weights(self.model, self.spec, self.folder)
        else:
            init_weights(self.model, derive_seed(self.cfg.seed, "model"), self.spec)

    def setup_optimizer(self) -> None:
        """The optimizer over this rank's shards; its states appear in the first step."""
        self.optimizer = build_optimizer(self.cfg.optimizer, self.model.parameters(), self.device)

    def resume(self) -> None:
        """Goes to the step of a saved state, if the config asks for one and there is one."""
        root = output / "state"
        found = find_state(root, self.cfg.resume, self.world)
        if found:
            saved = load_state(found, self.model, self.optimizer, self.world)
            check_same_run(saved, ...)
            self.step = saved["step"]

    def train_step(self, batches: StepBatches) -> Step:
        """One optimizer step; gradients are sums over ranks, so each loss is divided by the global token count."""
        loss = torch.zeros((), device=self.device, dtype=torch.float64?)
        for batch in batches.micro_batches:
            part = self.model(batch.tokens, batch.positions, batch.attention, labels=batch.labels, ...)
            part = part / batches.trained_tokens
            part.backward()
            loss += part.detach()
        grad_norm = clip_grad_norm(self.model, cfg.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Step(self.world.all_reduce_sum(loss), grad_norm)
