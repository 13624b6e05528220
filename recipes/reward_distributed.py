"""Reward models from pairs of answers, and classifiers of texts or chats: a score head on a
decoder, on one process or many.

    tune run reward_distributed --config llama3/8B_reward                                  adapters and the head
    tune run --nproc_per_node 4 reward_distributed --config llama3/8B_reward reward.trainable=all   every parameter
    tune run reward_distributed --config llama3/8B_reward reward.loss=classification reward.num_labels=3 \\
        data.source=mine.jsonl data.format=classification                                  three classes

The output projection gives way to a head of one row, or of a row for each class, whose scores are
read at the last token of each sequence. reward.loss=pairwise: data.format=preference, where a pair
may have a margin; it counts as one of batch_size and takes the memory of two sequences.
reward.loss=classification: data.format=classification, samples of text, prompt or messages, and a
label. There is no reference model, and no logits of a vocabulary. Levers as everywhere:

    data.packing=true                      several sequences in one of max_seq_len, each with scores of its own
    memory.activation_checkpointing=full   keep the layers' inputs only, recompute the rest in backward
    lora.quantize_base=nf4                 frozen weights in 4 bits

It ends with output_dir/model, which transformers' AutoModelForSequenceClassification opens, or with
output_dir/adapter, which PEFT opens on top of it (SEQ_CLS, the head among modules_to_save); a
checkpoint with a score head is gone on with.
"""

from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.adapter_loading import load_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.config import RewardFinetuneConfig, parse_arguments
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
from recipe_lib.training.scores import (
    describe_score_head,
    numbers_of,
    score_loss,
    score_metrics,
    scored_with,
    settle_items,
    train_score_head,
    validation_scores,
    values_of,
)

Config = RewardFinetuneConfig


class RewardFinetune:
    """Trains a score head, with adapters on the layers below it or with every parameter of
    these.
    """

    treats_all_alike = True  # layers, micro-batches: plans simulate a few; False where yours differ

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world, self.device = cfg, world, world.device
        training.check_output(cfg)
        self.source = training.resolve_model(cfg.model, scored=True, num_labels=cfg.num_labels)
        self.spec, self.start = (
            self.source.spec,
            self.source,
        )  # what is exported has other names in its config.json
        training.validate_parallelism(cfg, self.spec)
        self.lora = cfg.trained_adapters
        if self.lora and self.lora.adapter_path:
            check_adapter(Path(self.lora.adapter_path), self.spec, self.lora, self.source.folder)

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Sequences whose last token has the one label; pairs by turns, or each with its class."""
        self.data = training.TrainingData(self.cfg, self.source, self.world, prepared)
        self.source = settle_items(self.data, self.start, self.cfg.reward)

    def setup_model(self) -> None:
        """The decoder with its head, and adapters if these are trained; without values yet."""
        memory, dtype = self.cfg.memory, DTYPES[self.cfg.dtype]
        self.model = build_meta(self.spec, dtype)
        if self.lora:
            add_adapters(self.model, self.lora, dtype)
            train_score_head(self.model, self.lora, dtype)
        self.parallel = parallelize(self.model, self.cfg, self.world)
        training.check_host_memory(self.model, self.parallel, self.cfg, self.world)
        materialize(self.model, memory, self.device)
        self.scores = scored_with(self.model)

    def load_weights(self) -> None:
        """A checkpoint's, with its score head if it has one; else the head's follow from the
        seed.
        """
        folder, seed = self.start.folder, training.derive_seed(self.cfg.seed, "model")
        if folder:
            load_weights(self.model, self.spec, folder, seed)
        else:
            init_weights(self.model, seed, self.spec)
        if self.lora:
            init_adapters(self.model, training.derive_seed(self.cfg.seed, "adapters"))
            if self.lora.adapter_path:
                load_adapter(self.model, self.spec, Path(self.lora.adapter_path))
        if self.cfg.data.packing:
            divided = self.parallel.pipeline, self.parallel.token_ranks
            check_packing_isolation(self.model, self.spec, self.device, *divided)

    def setup_optimizer(self) -> None:
        """The optimizer over the head, and what else is trained."""
        named, cfg = dict(self.model.named_parameters()), self.cfg
        self.trained = [weight for weight in named.values() if weight.requires_grad]
        self.optimizer = training.build_optimizer(
            cfg.optimizer, named.items(), self.device, self.world, cfg.seed
        )
        optimizer, model, parallel = self.optimizer, self.model, self.parallel
        self.levers = training.apply_optimizer_levers(
            optimizer, model, parallel, cfg.memory, self.device
        )

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one."""
        held = self.model, self.optimizer, self.levers, self.data, self.world
        self.step = training.resume_run(self.cfg, *held)

    def describe(self) -> list[str]:
        """What the config comes to here: items, global batch, steps, bytes per rank, the head, FSDP
        units.
        """
        numbers = training.derived_numbers(
            self.cfg, self.world, self.model, self.parallel, self.data
        )
        adapters = [describe_adapters(self.model, self.lora)] if self.lora else []
        head, units = (
            describe_score_head(self.model, self.start),
            describe_units(self.model, self.parallel),
        )
        return [*self.data.report(), *numbers, *adapters, head, units]

    def compare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and numbers for the log, summed over the items of a micro-batch."""
        return score_loss(self.scores(batch), values_of(batch), self.cfg.reward)

    def train_step(self, batches: StepBatches) -> training.Step:
        """One optimizer step; gradients are sums over ranks, so losses are divided by the items of
        the global batch.
        """
        sums = torch.zeros(
            len(numbers_of(self.cfg.reward)), device=self.device, dtype=torch.float64
        )

        def loss_of(number: int, batch: Batch) -> torch.Tensor:
            loss, found = self.compare(batch)
            sums.add_(found)
            return loss / batches.num_items

        means = self.world.all_reduce_sum(
            training.backward_each(self.parallel, loss_of, batches, sums)
        )
        means = means / batches.num_items
        all_reduce_gradients(self.model, self.parallel, self.world)
        clip, norms = self.cfg.clip_grad_norm, self.levers.norms
        grad_norm = training.clip_grad_norm(self.trained, clip, self.world, self.parallel, norms)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return training.Step(means[0], grad_norm, score_metrics(means, self.cfg.reward))

    def validate(self) -> dict[str, float]:
        """The same numbers over all validation items."""
        return validation_scores(
            self.model, self.parallel, self.compare, self.cfg.reward, self.data, self.world
        )

    def train(self) -> None:
        """The loop over steps; at its end what was trained is on disk."""
        cfg, saves = self.cfg, self.cfg.checkpoint.save_model
        if saves and (not self.lora or self.lora.merge_on_save):
            check_room(self.model, Path(cfg.output_dir) / "model", self.world)
        with training.TrainingLoop(
            cfg, self.world, self.model, self.optimizer, self.data, done=self.step
        ) as loop:
            for batches in loop.steps():
                loop.finish(self.train_step(batches), batches, self.validate)
            if saves and self.lora:
                training.export_trained_adapter(cfg, self.model, self.source, self.data, self.world)
            elif saves:
                training.export_trained_model(cfg, self.model, self.source, self.data, self.world)


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(RewardFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
