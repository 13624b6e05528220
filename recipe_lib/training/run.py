"""Run a recipe from its config to its last step, by the same calls in the same order on all ranks.

A recipe, a file with a model's setup and its training step, calls `run_recipe` with its class,
which has the methods of `Recipe`. Below are the checks that need all ranks: that all have the same
settings, and that ranks which share a model have the same batches.
"""

import hashlib
from collections import defaultdict
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
from recipe_lib.training.resolve_model import (
    check_each_model,
    check_extra_parameters_are_stepped,
    check_models,
)
from recipe_lib.training.training_data import get_prepared, prepare_data


class Recipe(Protocol):
    """The methods of a recipe's class, in the order in which they are called."""

    def __init__(self, cfg: Any, world: World) -> None:
        """Keep config and world, and raise ConfigError for settings that this recipe lacks.

        Reads nothing large and allocates nothing on the device.
        """

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Build the TrainingData; no other method reads samples.

        prepared: the datasets, tokenized before there was a process group; None: tokenize now.
        """

    def setup_model(self) -> None:
        """Build the model, shard it, and give it memory, without values."""

    def load_weights(self) -> None:
        """Load the checkpoint into the model, or initialize its parameters."""

    def setup_optimizer(self) -> None:
        """Build the optimizer over the trained parameters."""

    def describe(self) -> list[str]:
        """Return lines for the log; those that begin with `warning:` are logged as warnings."""

    def resume(self) -> None:
        """Load the saved state that `resume` names, if it is set."""

    def train(self) -> None:
        """Train all steps that are left, and export the model."""


def run_recipe(recipe_class: type[Recipe], cfg: FullFinetuneConfig) -> None:
    """Run a recipe in this process, alone or as one rank under torchrun.

    Raise UserError for what a user can mend. `world.agree` raises it on all ranks together; where
    one rank raises alone, the heartbeat (what ends a run on all ranks) ends the others. Raise
    StoppedAndSaved after SIGTERM or SIGINT.
    """
    given_settings = list_settings(cfg)  # before `prepare_data` settles the formats in cfg
    with meet_ranks(cfg) as ranks:
        phase = ranks.heartbeat.phase
        # After the ranks have met and before they form a process group: no rank waits in a
        # collective until the samples are tokenized.
        with phase("reading the data"):
            tokenized = prepare_data(cfg)
        world = make_world(cfg, ranks)
        set_seeds(cfg.seed, world, alike=cfg.model.implementation != "native")
        with phase("setting up"):
            check_same_config(given_settings, world)
            prepared = world.agree(get_prepared, tokenized)
            check_same_config(list_settings(cfg), world)  # again: each rank may find other formats
            warn_of_slow_dtype(cfg, world)
            world.agree(check_capability, cfg, world)
            recipe: Recipe = world.agree(recipe_class, cfg, world)
        with phase("reading data"):
            world.agree(recipe.setup_data, prepared)
        with explain_out_of_memory("setting up the model", cfg, PeakMemory(world.device)):
            with phase("setting up the model"):
                recipe.setup_model()
                check_models(recipe, cfg, world)
            with phase("loading weights"):
                recipe.load_weights()
                # A parameter that nothing has written would train from what its memory held.
                check_each_model(recipe, world, check_written)
            with phase("setting up the optimizer"):
                recipe.setup_optimizer()
                check_extra_parameters_are_stepped(recipe, world)
            for line in recipe.describe():
                (warn_on_first_rank if line.startswith("warning:") else get_logger().info)(line)
            with phase("resuming"):
                recipe.resume()
        world.heartbeat.enter("starting to train")
        recipe.train()


def warn_of_slow_dtype(cfg: FullFinetuneConfig, world: World) -> None:
    """Warn, on the main rank of a run on CPUs, if this CPU has no instructions for `dtype`."""
    if world.device.type != "cpu" or not world.is_main or cfg.dtype not in ("bf16", "fp16"):
        return
    if not torch.backends.mkldnn.is_available():  # without oneDNN torch cannot tell
        return
    # Without such instructions torch multiplies one number at a time: a step's matmuls are some 80
    # times as slow as in fp32.
    if not getattr(torch.ops.mkldnn, f"_is_mkldnn_{cfg.dtype}_supported")():
        get_logger().warning(
            "warning: dtype=%s on this CPU, which has no instructions for it: matrices are"
            " multiplied many times as slowly as in fp32; set dtype=fp32",
            cfg.dtype,
        )


def check_capability(cfg: FullFinetuneConfig, world: World) -> None:
    """Raise ConfigError for settings that this GPU's compute capability lacks; never on a CPU."""
    capability = get_compute_capability(world.device)
    if capability is None:
        return
    name = torch.get_device_module(world.device).get_device_name(world.device)
    if faults := find_capability_faults(cfg, name, capability):
        raise ConfigError(*faults)


def check_same_config(settings: dict[str, str], world: World) -> None:
    """Raise ConfigError on every rank, with each key that differs between ranks. Collective.

    settings: this rank's, of `list_settings`.
    """
    # Machines may have different config files, or decide `parallel.strategy: auto` by different
    # GPUs. Such ranks would wait for each other in different collectives.
    gathered = world.gather_json(settings)
    faults = []
    for name in dict.fromkeys(key for rank_settings in gathered for key in rank_settings):
        values = [rank_settings.get(name, "no such key") for rank_settings in gathered]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is not None:
            faults.append(
                f"{name}: found {values[0]} on rank 0 and {values[rank]} on rank {rank}, expected"
                " the same on all ranks; start every machine with the same config and overrides"
            )
    if faults:
        raise ConfigError(*faults)


def list_settings(cfg: FullFinetuneConfig) -> dict[str, str]:
    """Return key and value, as text, of all settings that ranks must share.

    Paths and trackers are left out: they may differ from machine to machine.
    """
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    return {
        name: str(attrgetter(name)(cfg))
        for name, key in read_schema(config_class).keys.items()
        if key.section_class is None and not key.limits.get("path") and name != "log.trackers"
    }


def check_same_batches(batches: StepBatches, world: World) -> None:
    """Raise SetupError on every rank if ranks that must have the same batches have not. Collective.

    These are the ranks of a tensor-parallel group, of a pipeline, and of a group that shares
    sequences (context parallelism). With different batches they would silently train on a mixture
    of them. Batches are compared by a hash.
    """
    if world.size == world.data_ranks:
        return
    digest = hashlib.sha256()
    for batch in batches.micro_batches:
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.sequence_ids):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode() + tensor.cpu().numpy().tobytes())
    digests = defaultdict(set)
    for data_rank, text in world.gather_json([world.data_rank, digest.hexdigest()]):
        digests[data_rank].add(text)
    differing = [data_rank for data_rank, texts in digests.items() if len(texts) > 1]
    if differing:
        groups = {
            "of a pipeline": world.pipeline,
            "that share matrices": world.tensor,
            "that share sequences": world.context,
        }
        kinds = [kind for kind, group in groups.items() if group is not None]
        raise SetupError(
            f"data: the {world.size // world.data_ranks} ranks {' and '.join(kinds)} that have data"
            f" rank {differing[0]} found different batches for the same step, expected the same;"
            " see that every machine has the same data, tokenizer and version"
        )
