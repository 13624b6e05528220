"""Distillation: a model learns a larger one's probabilities of each next token, on one process or
many.

    tune run distill_distributed --config demo/distill
    tune run --nproc_per_node 2 distill_distributed --config llama3_2/1B_distill
    tune run distill_distributed --config demo/distill distill.trainable=adapters

The first two train every parameter, the last adapters.

The loss of a label token is distill.weight x divergence + (1 - distill.weight) x cross-entropy; the
divergence is that of distill.divergence, between softmax(logits / distill.temperature) of both,
times the temperature's square.

The frozen teacher runs a micro-batch before the model does, without a graph, and hands on its last
hidden states. Logits of either model exist for one chunk of the tokens at a time. The teacher is
sharded as the model is. Levers, keys that trade memory for time, of the teacher

    distill.quantize_teacher=nf4           its layers in 4 bits, quantized as they are read
    distill.stream_teacher=true            its layers in host memory, each on the device to run

and of both models

    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    memory.cpu_offload=true                weights in host memory, gathered layer by layer

Each step logs the means of divergence and cross_entropy besides the loss.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.config import parse_arguments
from recipe_lib.data import Batch, PreparedData, StepBatches, check_packing_isolation
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.methods.distill.config import DistillFinetuneConfig
from recipe_lib.methods.distill.loss import (
    build_teacher,
    check_same_ids,
    compute_distillation_means,
    compute_teacher_states,
    describe_teacher,
    load_teacher,
    resolve_teacher,
    validate_distillation,
)
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops.distillation import Distillation, Divergence
from recipe_lib.parallel import (
    DTYPES,
    World,
    all_reduce_gradients,
    describe_units,
    materialize,
    parallelize,
)

# The keys that a config of this recipe may have.
Config = DistillFinetuneConfig


class DistillFinetune:
    """Trains a model, all of it or adapters, on labels and on a teacher's probabilities."""

    # The planner simulates a few layers and micro-batches, as all are alike; False if yours differ.
    treats_all_alike = True

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.device = world.device
        self.output = Path(cfg.output_dir)
        self.step = 0  # number of optimizer steps that an earlier process has done
        training.check_output(cfg)  # raises if this run may not write there
        self.lora = cfg.trained_adapters  # settings of adapters; None: every parameter is trained
        # The checkpoint, or a preset with random weights.
        self.source = training.resolve_model(cfg.model)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        if self.lora is not None and self.lora.adapter_path:
            check_adapter(
                Path(self.lora.adapter_path), spec=self.spec, cfg=self.lora, base=self.source.folder
            )
        self.teacher_source = resolve_teacher(cfg)
        self.divergence = Divergence(
            cfg.distill.divergence, temperature=cfg.distill.temperature, beta=cfg.distill.beta
        )

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the tokenized samples, and check that the teacher has the same token ids.

        prepared: the datasets, tokenized before the ranks were a process group; None: tokenize them
        now.
        """
        self.data = training.TrainingData(
            self.cfg, source=self.source, world=self.world, prepared=prepared
        )
        check_same_ids(self.teacher_source, self.data.tokenizer, self.data)

    def setup_model(self) -> None:
        """Build the teacher and the model; their parameters have no values yet."""
        cfg = self.cfg
        dtype = DTYPES[cfg.dtype]
        self.teacher, self.teacher_parallel = build_teacher(self.teacher_source, cfg, self.world)
        self.model = build_meta(self.spec, dtype)  # shapes, no bytes
        if self.lora is not None:
            add_adapters(self.model, self.lora, dtype)
        # Pipeline stages, tensor parallel, `memory` settings, FSDP or DDP; parameter names stay.
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(
            self.model, parallel=self.parallel, cfg=cfg, world=self.world, other=self.teacher
        )
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Read this rank's part of both models from their checkpoints, or draw it.

        Adapters are read from lora.adapter_path, or start so that they change nothing.
        """
        seed = training.derive_seed(self.cfg.seed, "model")
        if self.source.folder:
            load_weights(self.model, spec=self.spec, folder=self.source.folder, seed=seed)
        else:
            init_weights(self.model, seed, self.spec)
        if self.lora is not None:
            init_adapters(self.model, training.derive_seed(self.cfg.seed, "adapters"))
            if self.lora.adapter_path:
                load_adapter(self.model, self.spec, Path(self.lora.adapter_path))
        load_teacher(self.teacher, self.teacher_source, self.cfg)
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
        """Build the optimizer over the trained parameters of the model."""
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

        A state holds nothing of the teacher.
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
        """Return lines for the log: data, batch, steps, bytes per rank, teacher, FSDP units."""
        lines = self.data.report()
        lines += training.list_derived_numbers(
            self.cfg,
            world=self.world,
            model=self.model,
            parallel=self.parallel,
            data=self.data,
        )
        if self.lora is not None:
            lines.append(describe_adapters(self.model, self.lora))
        lines.append(describe_teacher(self.cfg.distill, self.teacher, self.teacher_parallel))
        lines.append(describe_units(self.model, self.parallel))
        return lines

    def compute_loss(self, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over the label tokens of a micro-batch, `[]`.

        sums: fp64 `[2]`, the sums of divergence and cross-entropy over the step, to which those of
        this micro-batch are added.
        """
        teacher_states = compute_teacher_states(self.teacher, batch)
        head_loss = Distillation(
            teacher_states,
            divergence=self.divergence,
            weight=self.cfg.distill.weight,
            chunks=self.cfg.memory.loss_chunks,
            sums=sums,
        )
        inputs = (batch.tokens, batch.positions, batch.attention)
        return self.model(*inputs, labels=batch.labels, head_loss=head_loss)

    def train_step(self, batches: StepBatches) -> training.Step:
        """Run one optimizer step on this rank's micro-batches."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro_batch in self.parallel.micro_batches(batches):
            # Gradients are sums over ranks, so the mean is over the label tokens of all of them.
            micro_loss = self.compute_loss(micro_batch, sums) / max(1, batches.num_label_tokens)
            # In a pipeline through the head only; the schedule runs the stages' backward later.
            self.parallel.backward(micro_loss)
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
        metrics = compute_distillation_means(
            sums,
            num_label_tokens=batches.num_label_tokens,
            keys=self.cfg.distill,
            world=self.world,
        )
        return training.Step(loss=metrics.pop("loss"), grad_norm=grad_norm, metrics=metrics)

    def validate(self) -> dict[str, float]:
        """Return the means of loss, divergence and cross-entropy over all validation sequences."""
        return validate_distillation(
            self.model,
            parallel=self.parallel,
            add_sums=self.compute_loss,
            data=self.data,
            keys=self.cfg.distill,
            world=self.world,
        )

    def train(self) -> None:
        """Train all steps; end with the model or adapter on disk, or with a state if stopped."""
        writes_model = self.lora is None or self.lora.merge_on_save
        if self.cfg.checkpoint.save_model and writes_model:
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
            if self.cfg.checkpoint.save_model and self.lora is not None:
                training.export_trained_adapter(
                    self.cfg,
                    model=self.model,
                    source=self.source,
                    data=self.data,
                    world=self.world,
                )
            elif self.cfg.checkpoint.save_model:
                training.export_trained_model(
                    self.cfg,
                    model=self.model,
                    source=self.source,
                    data=self.data,
                    world=self.world,
                )


def main(argv: list[str] | None = None) -> None:
    """Run the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(DistillFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
