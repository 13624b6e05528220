"""A recipe from its config to its last step: the same calls, in the same order, on every rank.

`run_recipe` is the `main` of a recipe. Below it are the checks that need all ranks: that they have
the same settings, and those that share a model the same batches.
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
from recipe_lib.training.resolve_model import check_each_model, check_models, check_trained
from recipe_lib.training.training_data import get_prepared, prepare_data


class Recipe(Protocol):
    """The methods of a recipe's class, in the order in which they are called."""

    def __init__(self, cfg: Any, world: World) -> None:
        """Keep them; refuse what only this recipe cannot do. Nothing large is read or taken."""

    def setup_data(self, prepared: PreparedData | None) -> None:
        """Open the samples, as the only method. prepared: those that were tokenized before there
        were ranks.
        """

    def setup_model(self) -> None:
        """Build the model in this rank's memory, without values."""

    def load_weights(self) -> None:
        """Give the model its values."""

    def setup_optimizer(self) -> None:
        """Build the optimizer over what is trained."""

    def describe(self) -> list[str]:
        """Return lines for the log."""

    def resume(self) -> None:
        """Go on from a saved state, if asked to."""

    def train(self) -> None:
        """Train all steps, and write what they leave."""


def run_recipe(recipe_class: type[Recipe], cfg: FullFinetuneConfig) -> None:
    """Run a recipe: one process, or under torchrun every rank.

    What is wrong with config, model or data is reported once: where the ranks agree on it, or else
    by the heartbeat, which ends the others when one rank raises alone. Raise UserError and
    StoppedAndSaved.
    """
    given_settings = list_settings(cfg)  # before `prepare_data` settles the formats in cfg
    with meet_ranks(cfg) as ranks:
        phase = ranks.heartbeat.phase
        # When the ranks have met and before they are a process group, so that no rank waits in a
        # collective for the samples to be tokenized.
        with phase("reading the data"):
            tokenized = prepare_data(cfg)
        world = make_world(cfg, ranks)
        set_seeds(cfg.seed, world, alike=cfg.model.implementation != "native")
        with phase("setting up"):
            check_same_config(given_settings, world)
            prepared = world.agree(get_prepared, tokenized)
            check_same_config(list_settings(cfg), world)  # formats that each found in its data
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
                # No parameter enters training with what its memory held before.
                check_each_model(recipe, world, check_written)
            with phase("setting up the optimizer"):
                recipe.setup_optimizer()
                check_trained(recipe, world)
            for line in recipe.describe():
                (warn_on_first_rank if line.startswith("warning:") else get_logger().info)(line)
            with phase("resuming"):
                recipe.resume()
        world.heartbeat.enter("starting to train")
        recipe.train()


def warn_of_slow_dtype(cfg: FullFinetuneConfig, world: World) -> None:
    """Warn, on the main rank of a run on CPUs, if this one has no instructions for the dtype."""
    if world.device.type != "cpu" or not world.is_main or cfg.dtype not in ("bf16", "fp16"):
        return
    if not torch.backends.mkldnn.is_available():  # a torch that cannot say it
        return
    # Torch then multiplies such numbers one at a time, in a step's products some 80 times as slowly
    # as in fp32.
    if not getattr(torch.ops.mkldnn, f"_is_mkldnn_{cfg.dtype}_supported")():
        get_logger().warning(
            "warning: dtype=%s on this CPU, which has no instructions for it: matrices are"
            " multiplied many times as slowly as in fp32; set dtype=fp32",
            cfg.dtype,
        )


def check_capability(cfg: FullFinetuneConfig, world: World) -> None:
    """Raise ConfigError, by name, for what the card lacks; nothing on a CPU."""
    capability = get_compute_capability(world.device)
    if capability is None:
        return
    name = torch.get_device_module(world.device).get_device_name(world.device)
    if faults := find_capability_faults(cfg, name, capability):
        raise ConfigError(*faults)


def check_same_config(settings: dict[str, str], world: World) -> None:
    """Compare the settings of all ranks (`list_settings`). A collective.

    Raise ConfigError on every rank, with each key that differs.
    """
    # Where each machine has a config of its own, or has decided `parallel.strategy: auto` by its
    # own GPUs, ranks that train differently would wait for each other.
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
    """Return the values as text by key; none of paths and trackers, which may be of a machine."""
    config_class: Any = type(cfg)  # mypy takes a dataclass for unhashable, its class too
    return {
        name: str(attrgetter(name)(cfg))
        for name, key in read_schema(config_class).keys.items()
        if key.section_class is None and not key.limits.get("path") and name != "log.trackers"
    }


def check_same_batches(batches: StepBatches, world: World) -> None:
    """Compare the batches of a step over the ranks that have to have the same ones, by their hash.
    A collective.

    Those are the ranks of a tensor-parallel group, of a pipeline, and those that share sequences.
    Raise SetupError on every rank.
    """
    # Batches that differ would train silently on a mixture of them.
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
