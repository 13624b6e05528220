"""LoRA, QLoRA and DoRA: small trained adapters on frozen weights, on one process or many.

    tune run lora_finetune_distributed --config demo/lora                       one process
    tune run --nproc_per_node 2 lora_finetune_distributed --config llama3/8B_qlora     two GPUs
    tune run lora_finetune_distributed --config llama3/8B_lora lora.dora=true lora.rank=8  DoRA

A rank holds its shard of the frozen weights, with lora.quantize_base=nf4 a quarter of their bf16
bytes; of the adapters it holds weights, gradients and optimizer states. Frozen weights have no
gradients. The activations that layers keep for backward are as large as in full fine-tuning. Levers
are keys that trade memory for time:

    lora.quantize_base=nf4                 frozen weights in 4 bits, quantized as they are read
    memory.activation_checkpointing=full   keep the layers' inputs, recompute the rest in backward
    data.packing=true                      short sequences packed into one: none for padding
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    parallel.context=4                     a quarter of each long sequence on each rank
    memory.stream_layers=true              frozen layers in host memory, each on the device to run
    memory.cpu_offload=true                weights and states in host memory

It ends with output_dir/adapter, which PEFT and vLLM load; lora.merge_on_save=true also writes
output_dir/model.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.config import LoraFinetuneConfig, parse_arguments
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
Config = LoraFinetuneConfig


class LoraFinetune:
    """Trains adapters; the base weights are frozen, and quantized if the config says so."""

    # The planner simulates a few layers and micro-batches, as all are alike; False if yours differ.
    treats_all_alike = True

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.device = world.device
        self.output = Path(cfg.output_dir)
        self.step = 0  # number of optimizer steps that an earlier process has done
        training.check_output(cfg)  # raises if this run may not write there
        # The checkpoint, or a preset with random weights.
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        if cfg.lora.adapter_path:
            check_adapter(
                Path(cfg.lora.adapter_path), spec=self.spec, cfg=cfg.lora, base=self.source.folder
            )
        self.head_loss = training.build_head_loss(cfg)

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the tokenized samples.

        prepared: the datasets, tokenized before the ranks were a process group; None: tokenize them
        now.
        """
        self.data = training.TrainingData(
            self.cfg, source=self.source, world=self.world, prepared=prepared
        )

    def setup_model(self) -> None:
        """Build the frozen model with adapters; their parameters have no values yet."""
        cfg = self.cfg
        dtype = DTYPES[cfg.dtype]
        self.model = build_meta(self.spec, dtype)  # shapes, no bytes
        add_adapters(self.model, cfg.lora, dtype)
        # Pipeline stages, tensor parallel, `memory` settings, FSDP or DDP; parameter names stay.
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, parallel=self.parallel, cfg=cfg, world=self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Read, and quantize, this rank's part of the frozen weights; start the adapters.

        Adapters are read from lora.adapter_path, or start so that they change nothing.
        """
        seed = training.derive_seed(self.cfg.seed, "model")
        if self.source.folder:
            load_weights(self.model, spec=self.spec, folder=self.source.folder, seed=seed)
        else:
            init_weights(self.model, seed, self.spec)
        init_adapters(self.model, training.derive_seed(self.cfg.seed, "adapters"))
        if self.cfg.lora.adapter_path:
            load_adapter(self.model, self.spec, Path(self.cfg.lora.adapter_path))
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
        """Build the optimizer over the adapters: nothing else has gradients or states."""
        # For the norm of the gradients.
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
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
        """Go on from the step of a saved state, if the config asks for one.

        A state holds the adapters, and no frozen weights.
        """
        self.step = training.resume_run(
            self.cfg,
            model=self.model,
            optimizer=self.optimizer,
            levers=self.levers,
            data=self.data,
            world=self.world,
        )

    def describe(self) -> list[str]:
        """Return lines for the log: data, batch, steps, bytes per rank, adapters, FSDP units."""
        lines = self.data.report()
        lines += training.list_derived_numbers(
            self.cfg,
            world=self.world,
            model=self.model,
            parallel=self.parallel,
            data=self.data,
        )
        lines.append(describe_adapters(self.model, self.cfg.lora))
        lines.append(describe_units(self.model, self.parallel))
        return lines

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the label tokens of a micro-batch, `[]`."""
        inputs = (batch.tokens, batch.positions, batch.attention)
        return self.model(*inputs, labels=batch.labels, head_loss=self.head_loss)

    def train_step(self, batches: StepBatches) -> training.Step:
        """Run one optimizer step of the adapters on this rank's micro-batches."""
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
            self.trained,
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
        """Train all steps; end with the adapter on disk, or with a state if the run was stopped."""
        if self.cfg.lora.merge_on_save:
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
                training.export_trained_adapter(
                    self.cfg,
                    model=self.model,
                    source=self.source,
                    data=self.data,
                    world=self.world,
                )


def main(argv: list[str] | None = None) -> None:
    """Run the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(LoraFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
