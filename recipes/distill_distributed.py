"""Distillation: a model learns a larger one's probabilities of each next token, on one process or
many.

    tune run distill_distributed --config demo/distill                                        one process
    tune run --nproc_per_node 2 distill_distributed --config llama3_2/1B_distill              every parameter, two GPUs
    tune run distill_distributed --config demo/distill distill.trainable=adapters             LoRA

The loss of a label token is distill.weight x divergence + (1 - distill.weight) x cross-entropy; the
divergence is that of distill.divergence, between softmax(logits / distill.temperature) of both,
times the temperature's square.

The frozen teacher runs a micro-batch before the model does, without a graph, and hands on its last
hidden states. Logits of either model exist for one chunk of the tokens at a time. The teacher is
sharded as the model is; its levers:

    distill.quantize_teacher=nf4           its layers in 4 bits, quantized while they are read (int8: in 8)
    distill.stream_teacher=true            its layers in host memory, each here while it runs

and for both models

    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    memory.cpu_offload=true                weights in host memory, gathered layer by layer

Each step logs the means of divergence and cross_entropy besides the loss.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.huggingface import check_room
from recipe_lib.config import DistillFinetuneConfig, parse_arguments
from recipe_lib.data import Batch, PreparedData, StepBatches, check_packing_isolation
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.models import build_meta
from recipe_lib.ops.distillation import Distillation, Divergence
from recipe_lib.parallel import (
    DTYPES,
    World,
    all_reduce_gradients,
    describe_units,
    materialize,
    parallelize,
)
from recipe_lib.training.teacher import (
    check_same_ids,
    describe_teacher,
    distill_means,
    load_student,
    load_teacher,
    place_teacher,
    resolve_teacher,
    teacher_states,
    validation_distillation,
)

Config = DistillFinetuneConfig


class DistillFinetune:
    """Trains a model, all of it or adapters, on labels and on a teacher. `world`: this process's
    rank, device, mesh.
    """

    treats_all_alike = True  # layers, micro-batches: plans simulate a few; False where yours differ

    def __init__(self, cfg: Config, world: World):
        training.check_output(cfg)
        self.cfg, self.world, self.device, self.output = (
            cfg,
            world,
            world.device,
            Path(cfg.output_dir),
        )
        self.adapts = cfg.trained_adapters is not None
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        if self.adapts and cfg.lora.adapter_path:
            check_adapter(Path(cfg.lora.adapter_path), self.spec, cfg.lora, self.source.folder)
        self.teacher_source = resolve_teacher(cfg)
        self.divergence = Divergence(
            cfg.distill.divergence, cfg.distill.temperature, cfg.distill.beta
        )

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Tokens and labels, which mean the same to the teacher."""
        self.data = training.TrainingData(self.cfg, self.source, self.world, prepared)
        check_same_ids(self.teacher_source, self.data.tokenizer, self.data)

    def setup_model(self) -> None:
        """Build the teacher and the model; neither has values yet."""
        cfg, dtype = self.cfg, DTYPES[self.cfg.dtype]
        self.teacher, self.teacher_parallel = place_teacher(self.teacher_source, cfg, self.world)
        self.model = build_meta(self.spec, dtype)
        if self.adapts:
            add_adapters(self.model, cfg.lora, dtype)
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, self.parallel, cfg, self.world, other=self.teacher)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Those of both, each from its checkpoint; adapters change nothing yet."""
        load_student(self.model, self.source, self.cfg)
        load_teacher(self.teacher, self.teacher_source, self.cfg)
        if self.cfg.data.packing:
            check_packing_isolation(
                self.model, self.spec, self.device, multiple=self.parallel.token_ranks
            )

    def setup_optimizer(self) -> None:
        """The optimizer over what is trained of the model."""
        cfg, model, device = self.cfg, self.model, self.device
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = training.build_optimizer(
            cfg.optimizer, model.named_parameters(), device, self.world, cfg.seed
        )
        self.levers = training.apply_optimizer_levers(
            self.optimizer, model, self.parallel, cfg.memory, device
        )

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one; it holds nothing of the
        teacher.
        """
        self.step = training.resume_run(
            self.cfg, self.model, self.optimizer, self.levers, self.data, self.world
        )

    def describe(self) -> list[str]:
        """What the config comes to here: data, global batch, steps, bytes per rank, teacher, FSDP
        units.
        """
        lines = self.data.report()
        lines += training.derived_numbers(
            self.cfg, self.world, self.model, self.parallel, self.data
        )
        if self.adapts:
            lines.append(describe_adapters(self.model, self.cfg.lora))
        lines.append(describe_teacher(self.cfg.distill, self.teacher, self.teacher_parallel))
        return [*lines, describe_units(self.model, self.parallel)]

    def summed_loss(self, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """The loss summed over a micro-batch's label tokens; its two parts are added to `sums`."""
        keys, chunks = self.cfg.distill, self.cfg.memory.loss_chunks
        states = teacher_states(self.teacher, batch)
        head_loss = Distillation(states, self.divergence, keys.weight, chunks, sums)
        return self.model(
            batch.tokens, batch.positions, batch.attention, labels=batch.labels, head_loss=head_loss
        )

    def train_step(self, batches: StepBatches) -> training.Step:
        """One optimizer step; gradients are sums over ranks, so losses are divided by the step's
        label tokens.
        """
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)

        def loss_of(number: int, batch: Batch) -> torch.Tensor:
            return self.summed_loss(batch, sums) / max(1, batches.num_label_tokens)

        sums = training.backward_each(self.parallel, loss_of, batches, sums)
        all_reduce_gradients(self.model, self.parallel, self.world)
        grad_norm = training.clip_grad_norm(
            self.trained, self.cfg.clip_grad_norm, self.world, self.parallel, self.levers.norms
        )
        means = distill_means(sums, batches.num_label_tokens, self.cfg.distill, self.world)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return training.Step(means.pop("loss"), grad_norm, means)

    def validate(self) -> dict[str, float]:
        """The same means over all validation sequences."""
        return validation_distillation(
            self.model, self.parallel, self.summed_loss, self.data, self.cfg.distill, self.world
        )

    def train(self) -> None:
        """The loop over steps; at its end what was trained is on disk."""
        cfg, model, data, world = self.cfg, self.model, self.data, self.world
        if cfg.checkpoint.save_model and not self.adapts:
            check_room(model, self.output / "model", world)
        with training.TrainingLoop(cfg, world, model, self.optimizer, data, done=self.step) as loop:
            for batches in loop.steps():
                loop.finish(self.train_step(batches), batches, self.validate)
            if cfg.checkpoint.save_model:
                export = (
                    training.export_trained_adapter
                    if self.adapts
                    else training.export_trained_model
                )
                export(cfg, model, self.source, data, world)


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(DistillFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
