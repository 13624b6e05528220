"""Preference optimization on pairs of chosen and rejected answers (DPO, IPO, SimPO), or on answers
that are wanted or not (KTO), on one process or many.

    tune run dpo_distributed --config llama3/8B_dpo                                           adapters on one GPU
    tune run --nproc_per_node 4 dpo_distributed --config llama3/8B_dpo dpo.trainable=all      every parameter on four
    tune run dpo_distributed --config llama3/8B_dpo dpo.loss=simpo dpo.beta=2 dpo.simpo_gamma=1  without a reference
    tune run dpo_distributed --config llama3/8B_kto                                           single answers, labeled

data.format=preference: samples of a prompt, a chosen and a rejected answer. A pair counts as one of
batch_size and takes the memory of two sequences; both answers go through the model in one batch,
with data.packing=true several pairs in a sequence. dpo.loss=kto: data.format=kto, samples of a
prompt, an answer and a label; pairs are taken apart. It also runs each prompt with another sample's
answer, without gradients (docs/preference.md).

The losses sigmoid, ipo and kto hold the model to a reference: with dpo.trainable=adapters the model
without its adapters, which costs a forward pass and no memory; with dpo.trainable=all a frozen
copy, sharded like the model, which costs its parameters once more. dpo.loss=simpo and
dpo.reference_free=true need none. A run that starts from lora.adapter_path has the base without it
as reference: merge it first (tune export --merge) to have both as reference.

    memory.activation_checkpointing=full   keep the layers' inputs only, recompute the rest in backward
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time, in forward and in backward
    lora.quantize_base=nf4                 frozen weights in 4 bits

Each step logs the answers' mean rewards and their difference (reward_margin).
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, disable_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.adapter_loading import load_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.config import DpoFinetuneConfig, parse_arguments
from recipe_lib.data import Batch, PreparedData, StepBatches, check_packing_isolation
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import TokenLogProbs
from recipe_lib.parallel import (
    DTYPES,
    Parallel,
    World,
    all_reduce_gradients,
    describe_units,
    materialize,
    parallelize,
)
from recipe_lib.training.preference import (
    answer_log_probs,
    check_answers,
    check_reference,
    count_of_numbers,
    describe_reference,
    loss_of_answers,
    reference_point,
    step_numbers,
    validation_preference,
)

Config = DpoFinetuneConfig


class DpoFinetune:
    """Trains adapters or every parameter to prefer the chosen answers. `world`: this process's
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

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Pairs: of item i sequence 2 i is the chosen answer, with its prompt, and 2 i + 1 the
        rejected one; or answers with labels.
        """
        self.data = training.TrainingData(self.cfg, self.source, self.world, prepared)
        check_answers(self.data, self.cfg.dpo)

    def setup_model(self) -> None:
        """The model and, when all of it is trained, a frozen reference; neither has values yet."""
        self.reference: Decoder | None = None
        if self.cfg.copies_model:
            self.reference, self.reference_parallel = self.placed(trained=False)
        self.model, self.parallel = self.placed(trained=True)
        check_reference(self.cfg.dpo, self.model, self.reference)

    def placed(self, *, trained: bool) -> tuple[Decoder, Parallel]:
        """A model in this rank's memory, with or without adapters, or frozen as a whole; and how it
        is divided.
        """
        cfg, dtype = self.cfg, DTYPES[self.cfg.dtype]
        model = build_meta(self.spec, dtype)
        if not trained:
            model.requires_grad_(False)
        elif self.adapts:
            add_adapters(model, cfg.lora, dtype)
        parallel = parallelize(model, cfg, self.world, for_training=trained)
        training.check_host_memory(
            model, parallel, cfg, self.world, other=self.reference if trained else None
        )
        materialize(model, cfg.memory, self.device)
        return model, parallel

    def load_weights(self) -> None:
        """Both models start from the same checkpoint, or the same random values; adapters change
        nothing yet.
        """
        seed = training.derive_seed(self.cfg.seed, "model")
        for model in (self.model, self.reference):
            if model is not None and self.source.folder:
                load_weights(model, self.spec, self.source.folder, seed)
            elif model is not None:
                init_weights(model, seed, self.spec)
        if self.adapts:
            init_adapters(self.model, training.derive_seed(self.cfg.seed, "adapters"))
            if self.cfg.lora.adapter_path:
                load_adapter(self.model, self.spec, Path(self.cfg.lora.adapter_path))
        if self.cfg.data.packing:
            pipeline, multiple = self.parallel.pipeline, self.parallel.token_ranks
            check_packing_isolation(self.model, self.spec, self.device, pipeline, multiple)

    def setup_optimizer(self) -> None:
        """The optimizer over what is trained."""
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        weights = self.model.named_parameters()
        self.optimizer = training.build_optimizer(
            self.cfg.optimizer, weights, self.device, self.world, self.cfg.seed
        )
        self.levers = training.apply_optimizer_levers(
            self.optimizer, self.model, self.parallel, self.cfg.memory, self.device
        )

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one; the reference is what was
        loaded.
        """
        self.step = training.resume_run(
            self.cfg, self.model, self.optimizer, self.levers, self.data, self.world
        )

    def describe(self) -> list[str]:
        """What the config comes to here: pairs, global batch, steps, bytes per rank, reference,
        FSDP units.
        """
        lines = self.data.report()
        lines += training.derived_numbers(
            self.cfg, self.world, self.model, self.parallel, self.data
        )
        if self.adapts:
            lines.append(describe_adapters(self.model, self.cfg.lora))
        lines.append(describe_reference(self.cfg.dpo, self.reference))
        return [*lines, describe_units(self.model, self.parallel)]

    def answers(self, model: Decoder, batch: Batch) -> torch.Tensor:
        """Log-probability of each answer of a micro-batch; logits exist for one chunk of its tokens
        at a time.
        """
        inputs = (batch.tokens, batch.positions, batch.attention)
        log_probs = model(
            *inputs, labels=batch.labels, head_loss=TokenLogProbs(self.cfg.memory.loss_chunks)
        )
        return answer_log_probs(log_probs, batch, self.cfg.dpo)

    def reference_answers(self, micro_batches: Sequence[Batch]) -> Iterator[torch.Tensor | None]:
        """What the reference makes of the same answers, without a graph; None for a loss that needs
        none.
        """
        if not self.cfg.runs_reference:
            return repeat(None)
        model, off = (
            self.reference or self.model,
            nullcontext if self.reference else partial(disable_adapters, self.model),
        )
        parallel = self.reference_parallel if self.reference else self.parallel
        return training.result_of_each(
            parallel, partial(self.answers, model), micro_batches, inside=off
        )

    def train_step(self, batches: StepBatches) -> training.Step:
        """One optimizer step; gradients are sums over ranks, so losses are divided by the items of
        the global batch.
        """
        cfg, own, others = self.cfg.dpo, partial(self.answers, self.model), self.reference_answers
        sums = torch.zeros(count_of_numbers(cfg), device=self.device, dtype=torch.float64)
        point = reference_point(self.parallel, own, others, batches, self.world)
        references = others(batches.micro_batches)

        def loss_of(number: int, batch: Batch) -> torch.Tensor:
            loss, numbers = loss_of_answers(own(batch), next(references), batch, point, cfg)
            sums.add_(numbers)
            return loss / batches.num_items

        sums = training.backward_each(self.parallel, loss_of, batches, sums)
        loss, numbers = step_numbers(self.world.all_reduce_sum(sums), batches.num_items, point, cfg)
        all_reduce_gradients(self.model, self.parallel, self.world)
        grad_norm = training.clip_grad_norm(
            self.trained, self.cfg.clip_grad_norm, self.world, self.parallel, self.levers.norms
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return training.Step(loss, grad_norm, numbers)

    def validate(self) -> dict[str, float]:
        """The same numbers over all validation samples."""
        own, others = partial(self.answers, self.model), self.reference_answers
        return validation_preference(
            self.model, self.parallel, own, others, self.cfg.dpo, self.data, self.world
        )

    def train(self) -> None:
        """The loop over steps; at its end what was trained is on disk."""
        if self.cfg.checkpoint.save_model and not self.adapts:
            check_room(self.model, self.output / "model", self.world)
        with training.TrainingLoop(
            self.cfg, self.world, self.model, self.optimizer, self.data, done=self.step
        ) as loop:
            for batches in loop.steps():
                loop.finish(self.train_step(batches), batches, self.validate)
            if self.cfg.checkpoint.save_model:
                export = (
                    training.export_trained_adapter
                    if self.adapts
                    else training.export_trained_model
                )
                export(self.cfg, self.model, self.source, self.data, self.world)


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    training.run_recipe(DpoFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
