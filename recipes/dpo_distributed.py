"""Preference optimization on pairs of chosen and rejected answers (DPO, IPO, SimPO), or on answers
that are wanted or not (KTO), on one process or many.

    tune run dpo_distributed --config llama3/8B_dpo
    tune run --nproc_per_node 4 dpo_distributed --config llama3/8B_dpo dpo.trainable=all
    tune run dpo_distributed --config llama3/8B_dpo dpo.loss=simpo dpo.beta=2 dpo.simpo_gamma=1
    tune run dpo_distributed --config llama3/8B_kto

The first trains adapters on one GPU, the second every parameter on four, the third has no
reference, the last takes single answers with labels.

data.format=preference: samples of a prompt, a chosen and a rejected answer. A pair counts as one of
batch_size and takes the memory of two sequences. Both answers go through the model in one batch,
with data.packing=true several pairs in a sequence. dpo.loss=kto: data.format=kto, samples of a
prompt, an answer and a label; pairs are taken apart. It also runs each prompt with another sample's
answer, without gradients, to estimate the KL divergence (docs/preference.md).

The losses sigmoid, ipo and kto hold the model to a reference: with dpo.trainable=adapters the model
without its adapters, which costs a forward pass and no memory; with dpo.trainable=all a frozen
copy, sharded like the model, which costs its parameters once more. dpo.loss=simpo and
dpo.reference_free=true need none. A run that starts from lora.adapter_path has the base without it
as reference: merge it first (tune export --merge) to have both as reference. Levers, keys that
trade memory for time:

    memory.activation_checkpointing=full   keep the layers' inputs, recompute the rest in backward
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    lora.quantize_base=nf4                 frozen weights in 4 bits

Each step logs the answers' mean rewards and their difference (reward_margin).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

import torch

from recipe_lib import training
from recipe_lib.adapters import add_adapters, describe_adapters, disable_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.huggingface import check_room, load_weights
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.config import parse_arguments
from recipe_lib.data import Batch, PreparedData, StepBatches, check_packing_isolation
from recipe_lib.errors import end_process, run_for_exit_code
from recipe_lib.methods.dpo.checks import check_answers, check_reference, describe_reference
from recipe_lib.methods.dpo.config import DpoFinetuneConfig
from recipe_lib.methods.dpo.loss import (
    compute_preference_loss,
    compute_step_metrics,
    count_sums,
    estimate_kl,
    validate_preference,
)
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

# The keys that a config of this recipe may have.
Config = DpoFinetuneConfig
# An iterator that computes the log-probabilities of the next micro-batch's answers, fp64
# `[answers]`. None: there is no reference, or another rank of the pipeline has the last stage.
Logps = Iterator[torch.Tensor | None]


class DpoFinetune:
    """Trains adapters, or every parameter, to prefer the chosen answers."""

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

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the tokenized samples: pairs, or answers with labels.

        Of pair i sequence 2 i is the chosen answer, with its prompt, and 2 i + 1 the rejected one.
        prepared: the datasets, tokenized before the ranks were a process group; None: tokenize them
        now.
        """
        self.data = training.TrainingData(
            self.cfg, source=self.source, world=self.world, prepared=prepared
        )
        check_answers(self.data, self.cfg.dpo)

    def setup_model(self) -> None:
        """Build the policy, and a frozen reference if the loss needs a copy; without values."""
        self.reference: Decoder | None = None
        if self.cfg.copies_model:
            self.reference, self.reference_parallel = self.build_model(trainable=False)
        self.model, self.parallel = self.build_model(trainable=True)
        check_reference(self.cfg.dpo, self.model, self.reference)

    def build_model(self, *, trainable: bool) -> tuple[Decoder, Parallel]:
        """Return a model in this rank's memory, and how it is divided.

        trainable: True for the policy, with adapters if these are trained; False for a frozen
        reference.
        """
        cfg = self.cfg
        dtype = DTYPES[cfg.dtype]
        model = build_meta(self.spec, dtype)  # shapes, no bytes
        if not trainable:
            model.requires_grad_(False)
        elif self.lora is not None:
            add_adapters(model, self.lora, dtype)
        # Pipeline stages, tensor parallel, `memory` settings, FSDP or DDP; parameter names stay.
        parallel = parallelize(model, cfg, self.world, for_training=trainable)
        # The reference, if there is one, has its memory already.
        training.check_host_memory(
            model, parallel=parallel, cfg=cfg, world=self.world, other=self.reference
        )
        materialize(model, cfg.memory, self.device)
        return model, parallel

    def load_weights(self) -> None:
        """Read, or draw, this rank's part of both models, which start with the same weights."""
        seed = training.derive_seed(self.cfg.seed, "model")
        for model in (self.model, self.reference):
            if model is None:
                continue
            if self.source.folder:
                load_weights(model, spec=self.spec, folder=self.source.folder, seed=seed)
            else:
                init_weights(model, seed, self.spec)
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
        """Build the optimizer over the trained parameters."""
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
        """Go on from a saved state, if the config asks for one.

        A state holds nothing of the reference, which is as `load_weights` has read it.
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
        """Return lines for the log: data, steps, bytes per rank, reference, FSDP units."""
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
        lines.append(describe_reference(self.cfg.dpo, self.reference))
        lines.append(describe_units(self.model, self.parallel))
        return lines

    def compute_logps(self, model: Decoder, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each answer of a micro-batch, fp64 `[answers]`.

        Summed over its tokens, or their mean if the loss takes it. Logits exist for one chunk of
        the tokens at a time.
        """
        inputs = (batch.tokens, batch.positions, batch.attention)
        head_loss = TokenLogProbs(self.cfg.memory.loss_chunks)
        token_logps = model(*inputs, labels=batch.labels, head_loss=head_loss)
        return training.compute_answer_logps(token_logps, batch, mean=self.cfg.dpo.takes_mean_logps)

    def compute_policy_logps(self, micro_batches: Sequence[Batch]) -> Logps:
        """Return an iterator over the policy's log-probabilities, without gradients."""
        compute = partial(self.compute_logps, self.model)
        return training.evaluate_micro_batches(self.parallel, compute, micro_batches)

    def compute_reference_logps(self, micro_batches: Sequence[Batch]) -> Logps:
        """Return an iterator over the reference's log-probabilities, of None without reference."""
        if not self.cfg.runs_reference:
            return repeat(None, len(micro_batches))
        if self.reference is not None:
            return training.evaluate_micro_batches(
                self.reference_parallel, partial(self.compute_logps, self.reference), micro_batches
            )
        # The reference is the policy without its adapters.
        return training.evaluate_micro_batches(
            self.parallel,
            partial(self.compute_logps, self.model),
            micro_batches,
            inside=partial(disable_adapters, self.model),
        )

    def estimate_kl(self, batches: StepBatches) -> torch.Tensor | None:
        """Return KTO's estimate of KL(policy || reference); None for a loss that asks for none."""
        # Of answers of other samples to the same prompts.
        if not batches.mismatched:
            return None
        return estimate_kl(
            self.compute_policy_logps(batches.mismatched),
            self.compute_reference_logps(batches.mismatched),
            num_items=batches.num_items,
            world=self.world,
        )

    def compute_loss(
        self, batch: Batch, reference_logps: Logps, kl: torch.Tensor | None, sums: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss summed over the pairs, or answers, of a micro-batch, `[]`.

        reference_logps: of this micro-batch and the following ones. kl: KTO's estimate. sums: the
        sums of the metrics over the step, to which those of this micro-batch are added.
        """
        policy_logps = self.compute_logps(self.model, batch)
        loss, micro_sums = compute_preference_loss(
            policy_logps,
            # The reference's forward is here: it runs when it is asked for.
            reference_logps=next(reference_logps),
            batch=batch,
            kl=kl,
            cfg=self.cfg.dpo,
        )
        sums += micro_sums
        return loss

    def train_step(self, batches: StepBatches) -> training.Step:
        """Run one optimizer step on this rank's micro-batches."""
        sums = torch.zeros(count_sums(self.cfg.dpo), dtype=torch.float64, device=self.device)
        kl = self.estimate_kl(batches)
        reference_logps = self.compute_reference_logps(batches.micro_batches)
        for micro_batch in self.parallel.micro_batches(batches):
            # Gradients are sums over ranks, so the mean is over the items of all of them.
            micro_loss = (
                self.compute_loss(micro_batch, reference_logps, kl, sums) / batches.num_items
            )
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
        metrics = compute_step_metrics(
            self.world.all_reduce_sum(sums), num_items=batches.num_items, kl=kl, cfg=self.cfg.dpo
        )
        return training.Step(loss=metrics.pop("loss"), grad_norm=grad_norm, metrics=metrics)

    def validate(self) -> dict[str, float]:
        """Return the metrics of training over all validation samples."""
        return validate_preference(
            self.model,
            parallel=self.parallel,
            compute_policy_logps=self.compute_policy_logps,
            compute_reference_logps=self.compute_reference_logps,
            cfg=self.cfg.dpo,
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
    training.run_recipe(DpoFinetune, parse_arguments(argv, Config))


if __name__ == "__main__":
    end_process(run_for_exit_code(main))
