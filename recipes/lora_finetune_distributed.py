"""LoRA, QLoRA and DoRA: small trained adapters on frozen weights, on one process or many.

    tune run lora_finetune_distributed --config demo/lora                                  one process
    tune run --nproc_per_node 2 lora_finetune_distributed --config llama3/8B_qlora         two GPUs, base in 4 bits
    tune run lora_finetune_distributed --config llama3/8B_lora lora.dora=true lora.rank=8  DoRA

A rank holds its shard of the frozen weights, with lora.quantize_base=nf4 a quarter of their bf16
bytes; of the adapters it holds weights, gradients and optimizer states. Frozen weights have no
gradients. What layers keep for backward is as large as in full fine-tuning, and the same levers
reduce it:

    lora.quantize_base=nf4                 frozen weights in 4 bits, quantized while they are read (int8: in 8)
    memory.activation_checkpointing=full   keep the layers' inputs only, recompute the rest in backward
    data.packing=true                      short sequences packed into one of max_seq_len: no memory for padding
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    parallel.context=4                     a quarter of each long sequence on each rank; attention has whole ones
    memory.stream_layers=true              frozen layers in host memory, each here while it runs
    memory.cpu_offload=true                weights and states in host memory, gathered layer by layer

It ends with output_dir/adapter, which PEFT and vLLM load; lora.merge_on_save=true also writes
output_dir/model.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.adapter_loading import load_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
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

Config = LoraFinetuneConfig


class LoraFinetune:
    """Trains adapters; the base weights are frozen, and quantized if the config says so."""

    treats_all_alike = True  # layers, micro-batches: plans simulate a few; False where yours differ

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world, self.device = cfg, world, world.device
        self.output = Path(cfg.output_dir)
        training.check_output(cfg)
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        self.step = 0  # optimizer steps that an earlier process has done
        if cfg.lora.adapter_path:
            check_adapter(Path(cfg.lora.adapter_path), self.spec, cfg.lora, self.source.folder)
        self.head_loss = training.build_head_loss(cfg)

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Rows of tokens and labels."""
        self.data = training.TrainingData(self.cfg, self.source, self.world, prepared)

    def setup_model(self) -> None:
        """Frozen weights with adapters, before there is memory for either."""
        cfg, dtype = self.cfg, DTYPES[self.cfg.dtype]
        self.model = build_meta(self.spec, dtype)
        add_adapters(self.model, cfg.lora, dtype)
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, self.parallel, cfg, self.world)
        materialize(self.model, cfg.memory, self.device)
        self.trained = {
            name: weight for name, weight in self.model.named_parameters() if weight.requires_grad
        }

    def load_weights(self) -> None:
        """Frozen weights: each rank reads, and quantizes, its own part. Adapters: new ones, or
        those of a folder.
        """
        model, cfg = self.model, self.cfg
        seed = training.derive_seed(cfg.seed, "model")
        if self.source.folder:
            load_weights(model, self.spec, self.source.folder, seed)
        else:
            init_weights(model, seed, self.spec)
        init_adapters(model, training.derive_seed(cfg.seed, "adapters"))
        if cfg.lora.adapter_path:
            load_adapter(model, self.spec, Path(cfg.lora.adapter_path))
        if cfg.data.packing:
            check_packing_isolation(
                model, self.spec, self.device, self.parallel.pipeline, self.parallel.token_ranks
            )

    def setup_optimizer(self) -> None:
        """The optimizer over the adapters: nothing else has gradients or states."""
        trained = self.trained.items()
        self.optimizer = training.build_optimizer(
            self.cfg.optimizer, trained, self.device, self.world, self.cfg.seed
        )
        self.levers = training.apply_optimizer_levers(
            self.optimizer, self.model, self.parallel, self.cfg.memory, self.device
        )

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one; it holds adapters, no
        frozen weights.
        """
        self.step = training.resume_run(
            self.cfg, self.model, self.optimizer, self.levers, self.data, self.world
        )

    def describe(self) -> list[str]:
        """What the config comes to here: data, global batch, steps, bytes per rank, adapters, FSDP
        units.
        """
        numbers = training.derived_numbers(
            self.cfg, self.world, self.model, self.parallel, self.data
        )
        shape = [
            describe_adapters(self.model, self.cfg.lora),
            describe_units(self.model, self.parallel),
        ]
        return self.data.report() + numbers + shape

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the token losses of a micro-batch."""
        inputs = (batch.tokens, batch.positions, batch.attention)
        return self.model(*inputs, labels=batch.labels, head_loss=self.head_loss)

    def validate(self) -> dict[str, float]:
        """Mean loss of the label tokens of all validation sequences, each counted once."""
        return training.validation_loss(
            self.model, self.parallel, self.summed_loss, self.data, self.world
        )

    def train_step(self, batches: StepBatches) -> training.Step:
        """One optimizer step over the adapters."""
        loss = training.sum_gradients(self.parallel, self.summed_loss, batches, self.device)
        all_reduce_gradients(self.model, self.parallel, self.world)
        grad_norm = training.clip_grad_norm(
            self.trained.values(),
            self.cfg.clip_grad_norm,
            self.world,
            self.parallel,
            self.levers.norms,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return training.Step(self.world.all_reduce_sum(loss), grad_norm)

    def train(self) -> None:
        """The loop; it ends with the adapter on disk, or with a state if the run was stopped."""
        if self.cfg.lora.merge_on_save:
            check_room(self.model, self.output / "model", self.world)
        with training.TrainingLoop(
            self.cfg, self.world, self.model, self.optimizer, self.data, done=self.step
        ) as loop:
            for batches in loop.steps():
                loop.finish(self.train_step(batches), batches, self.validate)
            if self.cfg.checkpoint.save_model:
                training.export_trained_adapter(
                    self.cfg, self.model, self.source, self.data, self.world
                )


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(LoraFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
