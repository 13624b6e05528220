"""Full fine-tuning of a decoder, on one process or many: every parameter is trained.

    tune run full_finetune_distributed --config demo/full
    tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1
    torchrun --nproc_per_node 4 recipes/full_finetune_distributed.py --config llama3/8B_full

The first is one process, the second four GPUs, the third the same without the CLI.

A rank holds (parameters + gradients + optimizer states) / ranks, the FSDP units that are gathered
at the moment, and the activations that layers keep for backward. Levers are keys that trade memory
for time; in the order in which they are usually tried:

    batch_size=1                           fewer sequences at a time; the global batch stays with
                                           gradient_accumulation_steps
    data.packing=true                      short sequences packed into one: none for padding
    memory.activation_checkpointing=full   keep the layers' inputs, recompute the rest in backward
    parallel.fsdp_wrap_policy=memory_efficient   gather embedding and output one at a time
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    parallel.pipeline=4                    a quarter of the layers on each rank
    parallel.context=4                     a quarter of each long sequence on each rank
    optimizer.state_bits=8                 half of AdamW's states in bf16, rounded in blocks
    memory.optimizer_offload=true          states in host memory; one parameter's on the device
    memory.optimizer_in_backward=true      step each parameter as soon as it has a gradient; needs
                                           clip_grad_norm=null
    memory.activation_offload=true         activations are in host memory until backward
    memory.stream_layers=true              with the two before it: layers in host memory, too
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

# The keys that a config of this recipe may have.
Config = FullFinetuneConfig


class FullFinetune:
    """Trains every parameter of one model. `run_recipe` calls the methods in their order here."""

    # The planner simulates a few layers and micro-batches, as all are alike; False if yours differ.
    treats_all_alike = True

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.device = world.device
        self.output = Path(cfg.output_dir)
        self.step = 0  # number of optimizer steps that an earlier process has done
        training.check_output(cfg)  # raises if this run may not write there
        # The checkpoint, or a preset with random weights. A broken checkpoint is noticed here, from
        # its headers, before memory is taken.
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        self.head_loss = training.build_head_loss(cfg)

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the tokenized samples.

        The sequences of a step are a function of (seed, epoch, step) only. prepared: the datasets,
        tokenized before the ranks were a process group; None: tokenize them now.
        """
        self.data = training.TrainingData(
            self.cfg, source=self.source, world=self.world, prepared=prepared
        )

    def setup_model(self) -> None:
        """Build the model; its parameters have no values yet."""
        cfg = self.cfg
        self.model = build_meta(self.spec, DTYPES[cfg.dtype])  # shapes, no bytes
        # Pipeline stages, tensor parallel, `memory` settings, FSDP or DDP; parameter names stay.
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, parallel=self.parallel, cfg=cfg, world=self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Read this rank's slices of the checkpoint, or draw its part of a random start."""
        seed = training.derive_seed(self.cfg.seed, "model")
        if self.source.folder:
            load_weights(self.model, spec=self.spec, folder=self.source.folder, seed=seed)
        else:
            init_weights(self.model, seed, self.spec)
        # Packed documents that attend to each other would be trained on silently. Checked here, as
        # it takes weights.
        if self.cfg.data.packing:
            check_packing_isolation(
                self.model,
                spec=self.spec,
                device=self.device,
                pipeline=self.parallel.pipeline,
                multiple=self.parallel.token_ranks,
            )

    def setup_optimizer(self) -> None:
        """Build the optimizer over this rank's shards; its states are made in the first step."""
        self.optimizer = training.build_optimizer(
            self.cfg.optimizer,
            parameters=self.model.named_parameters(),
            device=self.device,
            world=self.world,
            seed=self.cfg.seed,
        )
        # Optimizer steps in backward, and states in host memory, if the config asks for them.
        self.levers = training.apply_optimizer_levers(
            self.optimizer,
            model=self.model,
            parallel=self.parallel,
            memory=self.cfg.memory,
            device=self.device,
        )

    def resume(self) -> None:
        """Go on from the step of a saved state, if the config asks for one."""
        self.step = training.resume_run(
            self.cfg,
            model=self.model,
            optimizer=self.optimizer,
            levers=self.levers,
            data=self.data,
            world=self.world,
        )

    def describe(self) -> list[str]:
        """Return lines for the log: data, global batch, steps, bytes per rank, FSDP units."""
        lines = self.data.report()
        lines += training.list_derived_numbers(
            self.cfg,
            world=self.world,
            model=self.model,
            parallel=self.parallel,
            data=self.data,
        )
        lines.append(describe_units(self.model, self.parallel))
        return lines

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the label tokens of a micro-batch, `[]`.

        Logits exist for one chunk of its tokens at a time.
        """
        inputs = (batch.tokens, batch.positions, batch.attention)
        return self.model(*inputs, labels=batch.labels, head_loss=self.head_loss)

    def train_step(self, batches: StepBatches) -> training.Step:
        """Run one optimizer step on this rank's micro-batches.

        In a pipeline the body of the loop runs only on the rank with the last stage, whenever a
        micro-batch arrives there.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_batch in self.parallel.micro_batches(batches):
            # Gradients are sums over ranks, so the mean is over the label tokens of all of them.
            micro_loss = self.compute_loss(micro_batch) / max(1, batches.num_label_tokens)
            # In a pipeline through the head only; the schedule runs the stages' backward later.
            self.parallel.backward(micro_loss)
            loss += micro_loss.detach()
            del micro_loss  # frees its graph before the next forward, as is planned
        # FSDP has summed gradients over its ranks in backward; this sums those it does not shard.
        all_reduce_gradients(self.model, self.parallel, self.world)
        grad_norm = training.clip_grad_norm(
            self.model.parameters(),
            max_norm=self.cfg.clip_grad_norm,
            world=self.world,
            parallel=self.parallel,
            norms_in_backward=self.levers.norms,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean_loss = self.world.all_reduce_sum(loss)
        return training.Step(loss=mean_loss, grad_norm=grad_norm)

    def validate(self) -> dict[str, float]:
        """Return the mean loss over the label tokens of all validation sequences."""
        return training.compute_validation_loss(
            self.model,
            parallel=self.parallel,
            compute_loss=self.compute_loss,
            data=self.data,
            world=self.world,
        )

    def train(self) -> None:
        """Train all steps; end with the exported model, or with a state if the run was stopped."""
        if self.cfg.checkpoint.save_model:
            check_room(self.model, self.output / "model", self.world)
        schedule = training.build_lr_schedule(self.cfg, self.data.total_steps)
        with training.TrainingLoop(
            self.cfg,
            world=self.world,
            model=self.model,
            optimizer=self.optimizer,
            data=self.data,
            done=self.step,
        ) as loop:
            for batches in loop.steps():
                learning_rate = schedule(loop.step)
                training.set_learning_rate(self.optimizer, learning_rate)
                loop.finish(
                    self.train_step(batches),
                    batches,
                    learning_rate=learning_rate,
                    validate=self.validate,
                )
            if self.cfg.checkpoint.save_model:
                training.export_trained_model(
                    self.cfg,
                    model=self.model,
                    source=self.source,
                    data=self.data,
                    world=self.world,
                )


def main(argv: list[str] | None = None) -> None:
    """Run the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(FullFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
