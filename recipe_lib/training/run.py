"""A recipe from its config to its last step: the same calls, in the same order, on every rank."""

from typing import Any, Protocol

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import PreparedData
from recipe_lib.logs import get_logger, warn_on_first_rank
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.parallel import World, make_world, meet_ranks
from recipe_lib.parallel.seeds import set_seeds
from recipe_lib.training.added_parameters import check_models, check_trained, check_values
from recipe_lib.training.check_card import check_card
from recipe_lib.training.same_on_all_ranks import check_same_config, settings_of
from recipe_lib.training.slow_dtype import warn_of_slow_dtype
from recipe_lib.training.training_data import prepare, prepared_or_raised


class Recipe(Protocol):
    """What a recipe's class has, in the order in which it is called."""

    def __init__(self, cfg: Any, world: World) -> None:
        """Keeps them; refuses what only this recipe cannot do. Nothing large is read or taken."""

    def setup_data(self, prepared: PreparedData | None) -> None:
        """The only part that reads the samples. prepared: those that were tokenized before there were ranks."""

    def setup_model(self) -> None:
        """The model in this rank's memory, without values."""

    def load_weights(self) -> None:
        """Its values."""

    def setup_optimizer(self) -> None:
        """The optimizer over what is trained."""

    def describe(self) -> list[str]:
        """Lines for the log."""

    def resume(self) -> None:
        """Goes on from a saved state, if asked to."""

    def train(self) -> None:
        """All steps, and what they leave."""


def run_recipe(recipe_class: type[Recipe], cfg: FullFinetuneConfig) -> None:
    """Runs a recipe: one process, or under torchrun every rank.

    Samples are tokenized when the ranks have met and before they are a process group, so that no rank waits for
    them in a collective. What is wrong
    with config, model or data is reported once: where the ranks agree on it, or else as the heartbeat has it, by which
    what one rank raises alone, in whatever part of the run, ends the others. No parameter enters training with what its
    memory held before. Raises UserError and StoppedAndSaved.
    """
    given = settings_of(cfg)
    with meet_ranks(cfg) as ranks:
        part = ranks.heartbeat.phase
        with part("reading the data"):
            tokenized = prepare(cfg)
        world = make_world(cfg, ranks)
        set_seeds(cfg.seed, world, alike=cfg.model.implementation != "native")
        with part("setting up"):
            check_same_config(given, world)
            prepared = world.agree(prepared_or_raised, tokenized)
            check_same_config(settings_of(cfg), world)  # formats that each found in its data
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
                check_values(recipe, world)
            with part("setting up the optimizer"):
                recipe.setup_optimizer()
                check_trained(recipe, world)
            for line in recipe.describe():
                (warn_on_first_rank if line.startswith("warning:") else get_logger().info)(line)
            with part("resuming"):
                recipe.resume()
        world.heartbeat.enter("starting to train")
        recipe.train()
