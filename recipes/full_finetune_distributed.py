"""Full fine-tuning of a decoder, on one process or many: every parameter is trained.

    tune run full_finetune_distributed --config demo/full                                      one process
    tune run --nproc_per_node 4 full_finetune_distributed --config llama3/8B_full batch_size=1 four GPUs
    torchrun --nproc_per_node 4 recipes/full_finetune_distributed.py --config llama3/8B_full   without the CLI

A rank holds (parameters + gradients + optimizer states) / ranks, the units that FSDP has gathered at the moment, and
what the layers keep for backward. The levers, in the order in which they are usually pulled:

    batch_size=1                           fewer rows at a time; gradient_accumulation_steps keeps the global batch
    memory.activation_checkpointing=full   keep the layers' inputs only, compute the rest again in backward
    parallel.wrapping=memory_efficient     gather embedding and output one at a time, not throughout the step
    memory.loss_chunks=16                  logits of a sixteenth of the tokens at a time
    memory.cpu_offload=true                parameters, gradients and states in host memory

To change it: `tune cp full_finetune_distributed mine.py`, edit, `tune run mine.py --config ...`. A key of your own is
a field of a subclass of FullFinetuneConfig, named `Config`: it is checked like ours.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe_lib.checkpoint.huggingface import check_room, check_weights, export_model, find_checkpoint, load_weights
from recipe_lib.checkpoint.state import find_state, load_state, save_state
from recipe_lib.config import FullFinetuneConfig, parse_arguments
from recipe_lib.data import (
    Batch,
    Dataset,
    StepBatches,
    build_dataset,
    build_validation_dataset,
    check_vocabulary,
    global_rows,
    make_step,
    steps_per_epoch,
    validation_steps,
    warn_of_positions,
)
from recipe_lib.errors import DivergedError, StoppedAndSaved, end_process, exit_code_of
from recipe_lib.logs import get_logger
from recipe_lib.memory import PeakMemory, apply_activation_checkpointing, explain_out_of_memory
from recipe_lib.models import build_meta, init_weights, preset_config, read_config, spec_from_config
from recipe_lib.parallel import DTYPES, World, compile_layers, describe_units, materialize, shard_model, start_world
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.training import (
    RunLog,
    StopSignal,
    build_loss,
    build_optimizer,
    check_output,
    check_same_data,
    clip_grad_norm,
    derive_seed,
    derived_numbers,
    learning_rate,
    set_learning_rate,
    set_numbers,
    set_seeds,
    step_metrics,
    total_steps,
)
from recipe_lib.units import GIB

Config = FullFinetuneConfig


@dataclass
class Step:
    """What one optimizer step leaves on the device: mean loss of its trained tokens, norm of its gradient."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


class FullFinetune:
    """Trains every parameter. `world`: this process's rank, device and mesh."""

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world, self.device = cfg, world, world.device
        self.output = Path(cfg.output_dir)
        self.step = 0  # optimizer steps done
        check_output(cfg)
        # The shape comes from the checkpoint's config.json or from a preset. The headers of the weights are read now:
        # a broken folder is noticed before data is tokenised or memory taken.
        where = cfg.model.path or cfg.model.preset or ""
        self.folder = find_checkpoint(where) if cfg.model.path else None
        self.model_config = read_config(self.folder) if self.folder else preset_config(where)
        self.spec = spec_from_config(self.model_config, where=str(self.folder or where))
        if self.folder:
            check_weights(self.spec, self.folder)
        self.loss_function = build_loss(cfg.loss)

    def setup_data(self) -> None:
        """Rows of tokens and labels. Which rows a step takes is a function of (seed, epoch, step) alone."""
        cfg = self.cfg
        self.tokenizer_path = Path(cfg.tokenizer.path or self.folder or "")
        self.tokenizer = load_tokenizer(self.tokenizer_path, cfg.tokenizer.chat_template)
        self.rows = build_dataset(cfg.data, self.tokenizer, cfg.max_seq_len)
        self.validation_rows = build_validation_dataset(cfg, self.tokenizer)
        check_vocabulary(self.tokenizer, self.spec.vocab_size, self.rows, self.validation_rows)
        warn_of_positions(self.spec.max_positions, self.rows, self.validation_rows)
        self.rows_per_step = cfg.batch_size * cfg.gradient_accumulation_steps * self.world.data_ranks
        self.epoch_steps = steps_per_epoch(len(self.rows), self.rows_per_step)
        self.total_steps = total_steps(self.epoch_steps, cfg.epochs, cfg.max_steps)

    def setup_model(self) -> None:
        """The model, changed in the order in which memory is taken; its parameters have no values yet."""
        cfg = self.cfg
        self.model = build_meta(self.spec, DTYPES[cfg.dtype])
        apply_activation_checkpointing(self.model, cfg.memory.activation_checkpointing)
        if cfg.compile:
            compile_layers(self.model)
        self.units = shard_model(self.model, cfg.parallel, cfg.memory, self.world)
        materialize(self.model, cfg.memory, self.device)

    def load_weights(self) -> None:
        """Each rank reads its own slices of the checkpoint, or draws its own part of a random start."""
        if self.folder:
            load_weights(self.model, self.spec, self.folder)
        else:
            init_weights(self.model, derive_seed(self.cfg.seed, "model"), self.spec)

    def setup_optimizer(self) -> None:
        """The optimizer over this rank's shards; its states appear in the first step."""
        self.optimizer = build_optimizer(self.cfg.optimizer, self.model.parameters(), self.device)

    def resume(self) -> None:
        """Jumps to the step of a saved state, if the config asks for one and there is one."""
        found = find_state(self.output / "state", self.cfg.resume, self.world) if self.cfg.resume else None
        if found:
            saved = load_state(found, self.model, self.optimizer, self.world)
            set_numbers(self.optimizer, self.cfg.optimizer)  # a changed config is what the run goes on with
            check_same_data(saved, self.data_identity(), found)
            self.step = saved["step"]
            get_logger().info("resume: %s, %d of %d steps done", found, self.step, self.total_steps)

    def describe(self) -> list[str]:
        """What the config comes to here: rows, global batch, steps, bytes per rank, FSDP units."""
        numbers = derived_numbers(self.cfg, self.world, self.model, self.rows, self.epoch_steps)
        data = [dataset.report for dataset in (self.rows, self.validation_rows) if dataset]
        return [*(line for report in data for line in report.lines()), *numbers, describe_units(self.model, self.units)]

    def data_identity(self) -> dict:
        """What has to be the same for a step to mean the same rows."""
        return {"data": self.rows.fingerprint, "rows_per_step": self.rows_per_step, "seed": self.cfg.seed}

    def train_step(self, batches: StepBatches) -> Step:
        """One optimizer step. Gradients are sums over ranks, so every loss is divided by the global token count.

        Gradients are reduced at every micro-batch: waiting for the last would keep them whole on every rank.
        """
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        for batch in batches.micro_batches:
            part = self.summed_loss(batch) / max(1, batches.trained_tokens)
            part.backward()
            loss = loss + part.detach()
        grad_norm = clip_grad_norm(self.model.parameters(), self.cfg.clip_grad_norm, self.world)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Step(self.world.all_reduce_sum(loss), grad_norm)

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the token losses of a micro-batch; logits exist for one chunk of its tokens at a time."""
        return self.model(
            batch.tokens,
            batch.positions,
            batch.attention,
            labels=batch.labels,
            loss_chunks=self.cfg.memory.loss_chunks,
            loss=self.loss_function,
        )

    @torch.no_grad()
    def validate(self, rows: Dataset) -> dict:
        """Mean loss of the trained tokens of all validation rows, each counted once."""
        world = self.world
        size = self.cfg.validation.batch_size or self.cfg.batch_size
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        for batches in validation_steps(rows, world.data_rank, world.data_ranks, size, self.tokenizer.pad_id):
            loss += self.summed_loss(batches.to(self.device).micro_batches[0])
        tokens = rows.report.trained_tokens
        return {
            "step": self.step,
            "validation_loss": self.world.all_reduce_sum(loss).item() / max(1, tokens),
            "validation_tokens": tokens,
        }

    def train(self) -> None:
        """The loop: rows, step, log, validation, state; ends with the exported model, or with a state if stopped."""
        cfg = self.cfg
        if cfg.checkpoint.save_model:
            check_room(self.model, self.output / "model", self.world)
        with RunLog(cfg, self.world, self.total_steps, done=self.step) as log, StopSignal() as stop:
            peak = PeakMemory(self.device)
            while self.step < self.total_steps:
                began = time.perf_counter()
                peak.reset()
                lr = learning_rate(cfg.lr_schedule, cfg.optimizer.lr, self.step, self.total_steps)
                set_learning_rate(self.optimizer, lr)
                batches = self.next_batches()
                with explain_out_of_memory("training step", cfg, peak):
                    step = self.train_step(batches)
                loss, grad_norm = step.loss.item(), step.grad_norm.item()  # the one place that waits for the device
                self.step += 1
                log.step(
                    step_metrics(
                        step=self.step,
                        epoch=self.step / self.epoch_steps,
                        loss=loss,
                        grad_norm=grad_norm,
                        lr=lr,
                        seconds=time.perf_counter() - began,
                        trained_tokens=batches.trained_tokens,
                        total_tokens=batches.total_tokens,
                        devices=self.world.size,
                        peak=peak.read(),
                    )
                )
                self.check_finite(loss, grad_norm, log)
                if self.validation_rows and self.is_due(cfg.validation.every_steps or self.epoch_steps):
                    log.validation(self.validate(self.validation_rows))
                stopped = stop.agreed(self.world)
                if stopped or (cfg.checkpoint.save_every_steps and self.is_due(cfg.checkpoint.save_every_steps)):
                    saved = self.save_state()
                if stopped:
                    log.close("stopped")
                    raise StoppedAndSaved(f"stopped after step {self.step}; go on with resume=latest ({saved})")
            if cfg.checkpoint.save_model:
                self.export()
            log.close("done")

    def next_batches(self) -> StepBatches:
        """This rank's micro-batches of the next step, on the device; its rows are the same for any number of ranks."""
        cfg, world = self.cfg, self.world
        epoch, step = divmod(self.step, self.epoch_steps)
        seed = derive_seed(cfg.seed, "data")
        rows = global_rows(len(self.rows), seed, epoch, step, self.rows_per_step, cfg.data.shuffle)
        accumulation, pad_id = cfg.gradient_accumulation_steps, self.tokenizer.pad_id
        batches = make_step(self.rows, rows, world.data_rank, world.data_ranks, cfg.batch_size, accumulation, pad_id)
        return batches.to(self.device)

    def is_due(self, every: int) -> bool:
        """True at each `every`-th step and at the last one."""
        return self.step % every == 0 or self.step == self.total_steps

    def check_finite(self, loss: float, grad_norm: float, log: RunLog) -> None:
        """DivergedError once loss or gradient norm is not a finite number; saved states are of earlier steps."""
        if not (abs(loss) < float("inf") and abs(grad_norm) < float("inf")):
            log.close("diverged")
            raise DivergedError(
                f"step {self.step}: found loss {loss} and grad_norm {grad_norm}, expected finite numbers; lower "
                f"optimizer.lr ({self.cfg.optimizer.lr:g}) or clip_grad_norm, and resume=latest from a saved state"
            )

    def save_state(self) -> Path:
        """A resumable state in output_dir/state/step_N: shards of model and optimizer, and where in the data we are."""
        extra = {"step": self.step, **self.data_identity()}
        root, keep = self.output / "state", self.cfg.checkpoint.keep
        return save_state(root, self.step, self.model, self.optimizer, extra, self.world, keep)

    def export(self) -> None:
        """The trained model as a Hugging Face folder in output_dir/model."""
        template = self.cfg.tokenizer.chat_template
        export_model(
            self.model,
            self.spec,
            self.model_config,
            self.output / "model",
            tokenizer_folder=self.tokenizer_path,
            max_shard_bytes=int(self.cfg.checkpoint.max_shard_gib * GIB),
            world=self.world,
            chat_template=Path(template) if template else None,
            stop_ids=self.tokenizer.stop_ids,
        )
        get_logger().info("model: %s", self.output / "model")


def main(argv: list[str] | None = None) -> None:
    """Runs the recipe with `--config CONFIG [key=value ...]`; under torchrun, on every rank."""
    cfg = parse_arguments(argv, Config)
    with start_world(cfg) as world:
        set_seeds(cfg.seed, world)
        recipe = world.agree(FullFinetune, cfg, world)
        world.agree(recipe.setup_data)
        recipe.setup_model()
        recipe.load_weights()
        recipe.setup_optimizer()
        for line in recipe.describe():
            get_logger().info(line)
        recipe.resume()
        recipe.train()


if __name__ == "__main__":
    end_process(exit_code_of(main))
