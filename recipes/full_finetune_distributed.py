"""Full fine-tuning of a decoder, on one process or many: every parameter is trained.

    tune run full_finetune_distributed --config demo/full                                      one process
    tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1 four GPUs
    torchrun --nproc_per_node 4 recipes/full_finetune_distributed.py --config llama3/8B_full   without the CLI

A rank holds (parameters + gradients + optimizer states) / ranks, the FSDP units that are gathered
at the moment, and what the layers keep for backward. The levers, in the order in which they are
usually pulled:

    batch_size=1                           fewer sequences at a time; gradient_accumulation_steps keeps the global batch
    data.packing=true                      short sequences packed into one of max_seq_len: no memory for padding
    memory.activation_checkpointing=full   keep the layers' inputs only, recompute the rest in backward
    parallel.fsdp_wrap_policy=memory_efficient     gather embedding and output one at a time, not throughout the step
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    parallel.pipeline=4                    a quarter of the layers on each rank; only hidden states are sent
    parallel.context=4                     a quarter of each long sequence on each rank; attention has whole ones
    optimizer.state_bits=8                 half of AdamW's states in bf16, rounded in blocks
    memory.optimizer_offload=true          states in host memory; on the device one parameter at a time
    memory.optimizer_in_backward=true      step each parameter as soon as it has a gradient; needs clip_grad_norm=null
    memory.activation_offload=true         what the layers keep is in host memory until backward
    memory.stream_layers=true              with the two before it: layers in host memory, stepped while they are here
    memory.cpu_offload=true                parameters, gradients and states in host memory

To change it: `tune cp full_finetune_distributed mine.py`, edit, `tune run mine.py --config ...`. A
new key is a field of a subclass of FullFinetuneConfig, named `Config`: it is checked like the
others.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.config import FullFinetuneConfig, parse_arguments
from recipe_lib.data import Batch, PreparedData, StepBatches, check_packing_isolation
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import (
    DTYPES,
    World,
    all_reduce_gradients,
    describe_units,
    materialize,
    parallelize,
)

Config = FullFinetuneConfig


class FullFinetune:
    """Trains every parameter. `world`: this process's rank, device and mesh."""

    treats_all_alike = True  # layers, micro-batches: plans simulate a few; False where yours differ

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world, self.device = cfg, world, world.device
        self.output = Path(cfg.output_dir)
        self.step = 0  # optimizer steps that an earlier process has done
        training.check_output(cfg)
        # A broken checkpoint is noticed here, from its headers, before memory is taken.
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        self.head_loss = training.build_head_loss(cfg)

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Tokens and labels. Which sequences a step takes is a function of (seed, epoch, step)
        alone.
        """
        self.data = training.TrainingData(self.cfg, self.source, self.world, prepared)

    def setup_model(self) -> None:
        """The model, changed in the order in which memory is taken; its parameters have no values
        yet.
        """
        cfg = self.cfg
        self.model = build_meta(self.spec, DTYPES[cfg.dtype])
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, self.parallel, cfg, self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Each rank reads its own slices of the checkpoint, or draws its own part of a random
        start.
        """
        seed = training.derive_seed(self.cfg.seed, "model")
        if self.source.folder:
            load_weights(self.model, self.spec, self.source.folder, seed)
        else:
            init_weights(self.model, seed, self.spec)
        if self.cfg.data.packing:
            pipeline, multiple = self.parallel.pipeline, self.parallel.token_ranks
            check_packing_isolation(self.model, self.spec, self.device, pipeline, multiple)

    def setup_optimizer(self) -> None:
        """The optimizer over this rank's shards; its states appear in the first step."""
        named = self.model.named_parameters()
        self.optimizer = training.build_optimizer(
            self.cfg.optimizer, named, self.device, self.world, self.cfg.seed
        )
        self.levers = training.apply_optimizer_levers(
            self.optimizer, self.model, self.parallel, self.cfg.memory, self.device
        )

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one."""
        self.step = training.resume_run(
            self.cfg, self.model, self.optimizer, self.levers, self.data, self.world
        )

    def describe(self) -> list[str]:
        """What the config comes to here: data, global batch, steps, bytes per rank, FSDP units."""
        units = describe_units(self.model, self.parallel)
        numbers = training.derived_numbers(
            self.cfg, self.world, self.model, self.parallel, self.data
        )
        return [*self.data.report(), *numbers, units]

    def train_step(self, batches: StepBatches) -> training.Step:
        """One optimizer step: forward and backward of each micro-batch, clipping, the optimizer."""
        loss = training.sum_gradients(self.parallel, self.summed_loss, batches, self.device)
        all_reduce_gradients(self.model, self.parallel, self.world)
        grad_norm = training.clip_grad_norm(
            self.model.parameters(),
            self.cfg.clip_grad_norm,
            self.world,
            self.parallel,
            self.levers.norms,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return training.Step(self.world.all_reduce_sum(loss), grad_norm)

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the token losses of a micro-batch; logits exist for one chunk of its tokens at a
        time.
        """
        inputs = (batch.tokens, batch.positions, batch.attention)
        return self.model(*inputs, labels=batch.labels, head_loss=self.head_loss)

    def validate(self) -> dict[str, float]:
        """Mean loss of the label tokens of all validation sequences, each counted once."""
        return training.validation_loss(
            self.model, self.parallel, self.summed_loss, self.data, self.world
        )

    def train(self) -> None:
        """The loop: batch, step, log, validation, state; ends with the exported model, or with a
        state if stopped.
        """
        if self.cfg.checkpoint.save_model:
            check_room(self.model, self.output / "model", self.world)
        with training.TrainingLoop(
            self.cfg, self.world, self.model, self.optimizer, self.data, done=self.step
        ) as loop:
            for batches in loop.steps():
                loop.finish(self.train_step(batches), batches, self.validate)
            if self.cfg.checkpoint.save_model:
                training.export_trained_model(
                    self.cfg, self.model, self.source, self.data, self.world
                )


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(FullFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
