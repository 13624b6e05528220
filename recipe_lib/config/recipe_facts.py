"""What a recipe's batch and model are, for all that plans or divides them; its config class says so."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe_lib.config.schema_adapters import LoraConfig

# What a recipe may train on -> the formats of `data.format` that have it; of plugins' formats nobody knows.
SAMPLES: dict[str, tuple[str, ...]] = {
    "answers": ("alpaca", "sharegpt", "messages", "prompt_completion", "text"),
    "pairs": ("preference",),
    "labeled answers": ("kto", "preference"),
    "classes": ("classification",),
}


class RecipeFacts:
    """Those of full fine-tuning; the config of a recipe of another kind overrides what is different."""

    @property
    def samples(self) -> str:
        """What a sample is, a key of SAMPLES."""
        return "answers"

    @property
    def trains_on_pairs(self) -> bool:
        """Whether a row is a pair of answers: data.format=preference."""
        return self.samples == "pairs"

    @property
    def compares_mismatched(self) -> bool:
        """Whether a step also evaluates each prompt with the answer of another sample."""
        return False

    @property
    def scores_sequences(self) -> bool:
        """Whether a score head reads each sequence's last token, in place of a head that predicts the next one."""
        return False

    @property
    def sequences_per_item(self) -> int:
        """Sequences of a micro-batch for each of `batch_size`."""
        return 2 if self.trains_on_pairs else 1

    @property
    def num_labels(self) -> int | None:
        """Rows of that head; None: as many as the checkpoint's has."""
        return None

    @property
    def own_loss(self) -> str | None:
        """What the recipe's loss is, if not the one of `loss`: `the loss of pairs is dpo.loss, ipo`."""
        return None

    @property
    def trained_adapters(self) -> "LoraConfig | None":
        """The settings of what is trained; None: every parameter is."""
        return None

    @property
    def adapters_instead(self) -> dict[str, str]:
        """Keys and values by which the recipe trains adapters in place of every parameter; empty: it cannot."""
        return {}

    @property
    def runs_reference(self) -> bool:
        """Whether a step also evaluates micro-batches by a frozen model."""
        return False

    @property
    def other_models(self) -> dict[str, str]:
        """Keys that name the checkpoints of further models, and for each the key of a preset in its place."""
        return {}

    @property
    def copies_model(self) -> bool:
        """Whether that is a second copy of the model, as there are no adapters that could be turned off."""
        return self.runs_reference and self.trained_adapters is None

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        """Names of what its validation measures, of which `checkpoint.best_metric` is to be one."""
        return ("validation_loss",)
