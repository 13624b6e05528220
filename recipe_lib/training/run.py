"""A recipe from its config to its last step: the same calls, in the same order, on every rank."""

import hashlib
from operator import attrgetter
from typing import Any, Protocol

import torch

from recipe_lib.config.flat_schema import read_schema
from recipe_lib.config.precision import find_capability_faults
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import PreparedData, StepBatches
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.logs import get_logger, warn_on_first_rank
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.models.language_model import check_written
from recipe_lib.ops.device import get_compute_capability
from recipe_lib.parallel import World, make_world, meet_ranks
from recipe_lib.parallel.world import set_seeds
from recipe_lib.training.added_parameters import check_each, check_models, check_trained
from recipe_lib.training.training_data import prepare, prepared_or_raised


class Recipe(Protocol):
    """What a recipe's class has, in the order in which it is called."""

    def __init__(self, cfg: Any, world: World) -> None:
        """Keeps them; refuses what only this recipe cannot do. Nothing large is read or taken."""

    def setup_data(self, prepared: PreparedData | None) -> None:
        """The only part that reads the samples. prepared: those that were tokenized before there
        were ranks.
        """

    def setup_model(self) -> None:
        """The model in this rank's memory, without values."""

    def load_weights(self) -> None:
        """Its values."""

    def setup_optimizer(self) -> None:
        """The optimizer over what is trained."""

    def describe(self) -> list[str]:
        """Return lines for the log."""

    def resume(self) -> None:
        """Go on from a saved state, if asked to."""

    def train(self) -> None:
        """All steps, and what they leave."""


def run_recipe(recipe_class: type[Recipe], cfg: FullFinetuneConfig) -> None:
    """Run a recipe: one process, or under torchrun every rank.

    Samples are tokenized when the ranks have met and before they are a process group, so that no
    rank waits for them in a collective. What is wrong with config, model or data is reported once:
    where the ranks agree on it, or else as the heartbeat has it, by which what one rank raises
    alone, in whatever part of the run, ends the others. No parameter enters training with what its
    memory held before. Raises UserError and StoppedAndSaved.
    """
    given = list_settings(cfg)
    with meet_ranks(cfg) as ranks:
        part = ranks.heartbeat.phase
        with part("reading the data"):
            tokenized = prepare(cfg)
        world = make_world(cfg, ranks)
        set_seeds(cfg.seed, world, alike=cfg.model.implementation != "native")
        with part("setting up"):
            check_same_config(given, world)
            prepared = world.agree(prepared_or_raised, tokenized)
            check_same_config(list_settings(cfg), world)  # formats that each found in its data
            warn_of_slow_dtype(cfg, world)
            world.agree(check_card, cfg, world)
            recipe: Recipe = world.agree(recipe_class, cfg, world)
        with part("reading data"):
            world.agree(recipe.setup_data, prepared)
        with explain_out_of_memory("setting up the model", cfg, PeakMemory(world.device)):
            with part("setting up the model"):
                recipe.setup_model()
                check_models(recipe, cfg, world)
            with part("loading weights"):
                recipe.load_weights()
                check_each(recipe, world, check_written)
            with part("setting up the optimizer"):
                recipe.setup_optimizer()
                check_trained(recipe, world)
            for line in recipe.describe():
                (warn_on_first_rank if line.startswith("warning:") else get_logger().info)(line)
            with part("resuming"):
                recipe.resume()
        world.heartbeat.enter("starting to train")
        recipe.train()


def warn_of_slow_dtype(cfg: FullFinetuneConfig, world: World) -> None:
    """On the main rank of a run on CPUs in bf16 or fp16: a line if this one's instructions do not
    have the type.

    Torch then multiplies such numbers one at a time, in a step's products some 80 times as slowly
    as in fp32.
    """
    if world.device.type != "cpu" or not world.is_main or cfg.dtype not in ("bf16", "fp16"):
        return
    if not torch.backends.mkldnn.is_available():  # a torch that cannot say it
        return
    if not getattr(torch.ops.mkldnn, f"_is_mkldnn_{cfg.dtype}_supported")():
        get_logger().warning(
            "warning: dtype=%s on this CPU, which has no instructions for it: matrices are"
            " multiplied many times as slowly as in fp32; set dtype=fp32",
            cfg.dtype,
        )


def check_card(cfg: FullFinetuneConfig, world: World) -> None:
    """ConfigError by name for what the card lacks; nothing on a CPU."""
    capability = get_compute_capability(world.device)
    if capability is None:
        return
    name = torch.get_device_module(world.device).get_device_name(world.device)
    if faults := find_capability_faults(cfg, name, capability):
        raise ConfigError(*faults)


# All ranks of a run have the same settings, and those that share a model the same batches: the
# checks.


_ABSENT = "no such key"


def check_same_config(settings: dict[str, str], world: World) -> None:
    """Compare the settings of all ranks (`list_settings`). A collective.

    Where each machine has a config of its own, or has decided `parallel.strategy: auto` by its own
    GPUs, ranks that train differently would wait for each other. Raises ConfigError on every rank,
    with each key that differs.
    """
    found = world.gather_json(settings)
    faults = []
    for name in dict.fromkeys(key for settings in found for key in settings):
        values = [settings.get(name, _ABSENT) for settings in found]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            faults.append(
                f"{name}: found {values[0]} on rank 0 and {values[other]} on rank {other}, expected"
                " the same on all ranks; start every machine with the same config and overrides"
            )
    if faults:
        raise ConfigError(*faults)


def list_settings(cfg: FullFinetuneConfig) -> dict[str, str]:
    """Return the values as text by key; none of paths and trackers, which may be a machine's own."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    keys = read_schema(config_class).keys.items()
    return {
        name: str(attrgetter(name)(cfg))
        for name, key in keys
        if key.section_class is None and not key.limits.get("path") and name != "log.trackers"
    }


def check_same_batches(batches: StepBatches, world: World) -> None:
    """Compare the batches of a step over the ranks that have to have the same ones, by their hash.
    A collective.

    Those are the ranks of a tensor-parallel group, of a pipeline, and those that share sequences:
    batches that differ would train silently on a mixture of them. Raises SetupError on every rank.
    """
    if world.size == world.data_ranks:
        return
    digest = hashlib.sha256()
    for batch in batches.micro_batches:
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.sequence_ids):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + tensor.cpu().numpy().tobytes())
    found: dict[int, set[str]] = {}
    for data_rank, text in world.gather_json([world.data_rank, digest.hexdigest()]):
        found.setdefault(data_rank, set()).add(text)
    differing = [data_rank for data_rank, texts in found.items() if len(texts) > 1]
    if differing:
        kinds = ["of a pipeline"] * (world.pipeline is not None) + ["that share matrices"] * (
            world.tensor is not None
        )
        kinds += ["that share sequences"] * (world.context is not None)
        raise SetupError(
            f"data: the {world.size // world.data_ranks} ranks {' and '.join(kinds)} that have data"
            f" rank {differing[0]} found different batches for the same step, expected the same;"
            " see that every machine has the same data, tokenizer and version"
        )
