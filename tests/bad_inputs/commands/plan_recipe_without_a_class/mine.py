"""A program that is no recipe of our kind."""

from recipe_lib.config import FullFinetuneConfig

Config = FullFinetuneConfig


class Training:
    """It has no train_step."""

    def setup_model(self) -> None:
        """Nothing."""

    def setup_optimizer(self) -> None:
        """Nothing."""


def main(argv):
    """Nothing."""
