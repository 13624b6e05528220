"""A teacher's likeliest tokens of a config's sequences, written to a folder a shard at a time."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from recipe_lib.config.recipes.distill_distributed import DistillFinetuneConfig
from recipe_lib.config.schema import ParallelConfig
from recipe_lib.config.suggest import show
from recipe_lib.data import Dataset, make_step
from recipe_lib.errors import ConfigError
from recipe_lib.files import make_folder, remove_leftovers, replace_text, storage_faults
from recipe_lib.logs import get_logger
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.distillation import TopTokens, likeliest_tokens
from recipe_lib.parallel import World, start_world
from recipe_lib.report.phases import phase
from recipe_lib.training.resolve_model import resolve_model
from recipe_lib.training.taught_tokens import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    TaughtFacts,
    TaughtTokens,
    facts_text,
    read_facts,
)
from recipe_lib.training.teacher import (
    check_same_ids,
    load_teacher,
    place_teacher,
    resolve_teacher,
    teacher_states,
)
from recipe_lib.training.training_data import TrainingData, prepare, prepared_or_raised
from recipe_lib.units import counted


def teach(cfg: DistillFinetuneConfig, out: Path, top_k: int, dtype: str, shard_sequences: int) -> None:
    """Runs the teacher of a config over its training and validation sequences, on one device, without training.

    What is in the folder already, whole and of the same teacher, data and numbers, stays: a call goes on where an
    earlier one was stopped. Raises UserErrors.
    """
    cfg = replace(cfg, parallel=ParallelConfig(), output_dir=str(out), overwrite_output_dir=False, resume=None)
    source, teacher_source = resolve_model(cfg.model), resolve_teacher(cfg)
    assert teacher_source is not None
    prepared = prepared_or_raised(prepare(cfg))
    with start_world(cfg) as world:
        data = TrainingData(cfg, source, world, prepared)
        check_same_ids(teacher_source, data.tokenizer, data)
        vocabulary = min(source.spec.vocab_size, teacher_source.spec.vocab_size)
        if top_k > vocabulary:
            raise ConfigError(f"--top-k: found {top_k}, expected at most the {vocabulary} tokens that both models have")
        parts = {TRAIN: data.dataset}
        if data.validation_dataset is not None:
            parts[VALIDATION] = data.validation_dataset
        prints = {part: dataset.fingerprint for part, dataset in parts.items()}
        settings = (teacher_source.name, top_k, cfg.distill.temperature, vocabulary, dtype, shard_sequences)
        with storage_faults():
            taught = _folder(out, TaughtFacts(*settings, prints))
            for part, dataset in parts.items():
                taught.use(part, dataset)
            missing = [(part, at) for part in parts for at in taught.shards(part) if not taught.is_whole(part, at)]
            if missing:
                teacher, _ = place_teacher(teacher_source, cfg, world)
                load_teacher(teacher, teacher_source, cfg)
                _write(taught, missing, parts, teacher, data, cfg, world)
        written = f"{counted(len(missing), 'shard')} written" if missing else "all shards were there"
        get_logger().info("taught: %s (%s); train with distill.from_disk=%s", out, written, out)


def _folder(out: Path, facts: TaughtFacts) -> TaughtTokens:
    """The folder with its manifest, which is there or made. ConfigError for one of other facts."""
    if not (out / MANIFEST).is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"--out: {show(str(out))} is not empty and holds no {MANIFEST}; choose another folder")
        if not out.is_dir():
            make_folder(out)
        replace_text(out / MANIFEST, facts_text(facts))
    found = asdict(read_facts(out, "--out"))
    for name, wanted in asdict(facts).items():
        if found[name] != wanted:
            raise ConfigError(
                f"--out: {show(str(out))} was begun with {name} {found[name]}, found {wanted} now; choose another "
                "folder, or remove this one"
            )
    remove_leftovers(out, "*.safetensors")
    return TaughtTokens(out, facts, "--out")


def _write(
    taught: TaughtTokens,
    missing: list[tuple[str, int]],
    parts: dict[str, Dataset],
    teacher: Decoder,
    data: TrainingData,
    cfg: DistillFinetuneConfig,
    world: World,
) -> None:
    total = sum(len(taught.sequences(*shard)) for shard in missing)
    with phase("teaching", total, "sequences") as going:
        for part, shard in missing:
            tops: list[TopTokens] = []
            numbers = list(taught.sequences(part, shard))
            for first in range(0, len(numbers), cfg.batch_size):
                slots = [np.array([number]) for number in numbers[first : first + cfg.batch_size]]
                step = make_step(parts[part], slots, 0, 1, len(slots), 1, data.tokenizer.pad_id)
                states = teacher_states(teacher, step.micro_batches[0].to(world.device))
                settings = (taught.facts.top_k, taught.facts.temperature, taught.facts.vocabulary)
                top = likeliest_tokens(states, *settings, cfg.memory.loss_chunks)
                tops.append(TopTokens(top.ids.to("cpu"), top.log_probs.to("cpu"), top.rest.to("cpu"), top.vocabulary))
                going.advance(len(slots))
            taught.write(part, shard, tops)
