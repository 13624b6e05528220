"""Reward models from pairs of answers, and classifiers of texts or chats: a score head on a
decoder, on one process or many.

    tune run reward_distributed --config llama3/8B_reward
    tune run --nproc_per_node 4 reward_distributed --config llama3/8B_reward reward.trainable=all
    tune run reward_distributed --config llama3/8B_reward reward.loss=classification \\
        reward.num_labels=3 data.source=mine.jsonl data.format=classification

The first trains adapters and the head, the second every parameter, the third three classes.

The output projection gives way to a head of one row, or of a row for each class, whose scores are
read at the last token of each sequence. reward.loss=pairwise: data.format=preference, where a pair
may have a margin; it counts as one of batch_size and takes the memory of two sequences.
reward.loss=classification: data.format=classification, samples of text, prompt or messages, and a
label. There is no reference model, and no logits of a vocabulary. Levers, keys that trade memory
for time:

    data.packing=true                      several sequences in one, each with its own scores
    memory.activation_checkpointing=full   keep the layers' inputs, recompute the rest in backward
    lora.quantize_base=nf4                 frozen weights in 4 bits

It ends with output_dir/model, which transformers' AutoModelForSequenceClassification opens, or with
output_dir/adapter, which PEFT opens on top of it (SEQ_CLS, the head among modules_to_save). The
score head of a checkpoint that has one is trained further.
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
from recipe_lib.methods.reward.config import RewardFinetuneConfig
from recipe_lib.methods.reward.items import describe_score_head, prepare_items
from recipe_lib.methods.reward.loss import (
    compute_score_loss,
    compute_score_metrics,
    compute_scores,
    list_summed_metrics,
    train_score_head,
    validate_scores,
)
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
Config = RewardFinetuneConfig


class RewardFinetune:
    """Trains a score head, with adapters on the layers below it or with every parameter."""

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
        self.source = training.resolve_model(cfg.model, scored=True, num_labels=cfg.num_labels)
        self.spec = self.source.spec
        training.validate_parallelism(cfg, self.spec)
        if self.lora is not None and self.lora.adapter_path:
            check_adapter(
                Path(self.lora.adapter_path), spec=self.spec, cfg=self.lora, base=self.source.folder
            )

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the tokenized samples: sequences with one label, at the last token.

        Of pair i sequence 2 i is the chosen answer, and 2 i + 1 the rejected one. In classification
        each sequence has its class. prepared: the datasets, tokenized before the ranks were a
        process group; None: tokenize them now.
        """
        self.data = training.TrainingData(
            self.cfg, source=self.source, world=self.world, prepared=prepared
        )
        # The source with the names of the classes, for the config.json of the export.
        self.exported = prepare_items(self.data, self.source, self.cfg.reward)

    def setup_model(self) -> None:
        """Build the decoder with its head, and adapters if these are trained; without values."""
        cfg = self.cfg
        dtype = DTYPES[cfg.dtype]
        self.model = build_meta(self.spec, dtype)  # shapes, no bytes
        if self.lora is not None:
            add_adapters(self.model, self.lora, dtype)
            train_score_head(self.model, self.lora, dtype)
        # Pipeline stages, tensor parallel, `memory` settings, FSDP or DDP; parameter names stay.
        self.parallel = parallelize(self.model, cfg, self.world)
        training.check_host_memory(self.model, parallel=self.parallel, cfg=cfg, world=self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Read this rank's part of the checkpoint; draw a score head that it lacks from the seed.

        Without a checkpoint all is drawn. Adapters are read from lora.adapter_path, or start so
        that they change nothing.
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
        """Build the optimizer over the head, and adapters or all other parameters."""
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
        """Return lines for the log: items, batch, steps, bytes per rank, the head, FSDP units."""
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
        lines.append(describe_score_head(self.model, self.source))
        lines.append(describe_units(self.model, self.parallel))
        return lines

    def compute_loss(self, batch: Batch, sums: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over the items (sequences or pairs) of a micro-batch, `[]`.

        sums: the sums of the metrics over the step, to which those of this micro-batch are added.
        """
        scores = compute_scores(self.model, batch)
        loss, micro_sums = compute_score_loss(scores, training.get_values(batch), self.cfg.reward)
        sums += micro_sums
        return loss

    def train_step(self, batches: StepBatches) -> training.Step:
        """Run one optimizer step on this rank's micro-batches."""
        num_sums = len(list_summed_metrics(self.cfg.reward))
        sums = torch.zeros(num_sums, dtype=torch.float64, device=self.device)
        for micro_batch in self.parallel.micro_batches(batches):
            # Gradients are sums over ranks, so the mean is over the items of all of them.
            micro_loss = self.compute_loss(micro_batch, sums) / batches.num_items
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
        metrics = compute_score_metrics(
            self.world.all_reduce_sum(sums), num_items=batches.num_items, cfg=self.cfg.reward
        )
        return training.Step(loss=metrics.pop("loss"), grad_norm=grad_norm, metrics=metrics)

    def validate(self) -> dict[str, float]:
        """Return the metrics of training over all validation items."""
        return validate_scores(
            self.model,
            parallel=self.parallel,
            add_sums=self.compute_loss,
            cfg=self.cfg.reward,
            data=self.data,
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
                    source=self.exported,
                    data=self.data,
                    world=self.world,
                )
            elif self.cfg.checkpoint.save_model:
                training.export_trained_model(
                    self.cfg,
                    model=self.model,
                    source=self.exported,
                    data=self.data,
                    world=self.world,
                )


def main(argv: list[str] | None = None) -> None:
    """Run the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(RewardFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
