"""Config of the recipe for reward models and classifiers of sequences, and its section `reward`."""

from dataclasses import dataclass, field

from recipe_lib.config.flat_schema import key
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig


@dataclass
class RewardConfig:
    """A score head in place of the output projection, read at the last token of each sequence."""

    loss: str = key(
        "pairwise",
        "`pairwise`: a reward model, of pairs of answers (Bradley-Terry); `classification`:"
        " cross-entropy over classes.",
        choices=("pairwise", "classification"),
        known_as="none has it: TRL has a trainer of its own, and transformers goes by num_labels",
    )
    num_labels: int | None = key(
        None,
        "classification: number of classes; null: as many as the checkpoint's score head has.",
        minimum=2,
        needs="reward.loss = classification",
        known_as="HF num_labels",
    )
    center_rewards_coefficient: float | None = key(
        None,
        "pairwise: adds this times (chosen reward + rejected reward)^2 to the loss (arXiv"
        " 2312.09244); null: nothing.",
        above=0,
        needs="reward.loss = pairwise",
        known_as="TRL RewardConfig.center_rewards_coefficient",
    )
    trainable: str = key(
        "adapters",
        "`adapters`: on the layers, and the head as a whole; `all`: every parameter.",
        choices=("adapters", "all"),
        known_as="none has it: PEFT's models are made in code",
    )


@dataclass
class RewardFinetuneConfig(LoraFinetuneConfig):
    """Config of `reward_distributed`."""

    recipe: str = key(
        "reward_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    reward: RewardConfig = field(default_factory=RewardConfig)
    adapters_instead = {"reward.trainable": "adapters"}
    scores_sequences = True

    @property
    def samples(self) -> str:
        """As `reward.loss` says."""
        return "pairs" if self.reward.loss == "pairwise" else "classes"

    @property
    def num_labels(self) -> int | None:
        """One reward, or a score for each class."""
        return 1 if self.reward.loss == "pairwise" else self.reward.num_labels

    @property
    def own_loss(self) -> str | None:
        """That of `reward.loss`."""
        return f"the loss of scores is reward.loss, {self.reward.loss}"

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        """Means over all items."""
        pairs = ("loss", "reward_chosen", "reward_rejected", "accuracy", "reward_margin")
        numbers = pairs if self.reward.loss == "pairwise" else ("loss", "accuracy")
        return tuple(f"validation_{name}" for name in numbers)
