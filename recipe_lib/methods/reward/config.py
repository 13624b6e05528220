"""Define the config of `reward_distributed`, which trains reward models and sequence classifiers.

`RewardConfig` is its section `reward`, `_RULES` are the combinations of keys that are refused, and
`RewardFinetuneConfig` is the whole, with the facts that the library asks of every recipe's config
class (`config.schema.RecipeFacts`). A field is declared by `key(default, help, limits...)`; users
see the text `help`. Imports no torch, so that configs are checked without it.
"""

from dataclasses import dataclass, field

from recipe_lib.config.compatibility.data_rules import FORMAT_KEYS, list_unused_formats
from recipe_lib.config.compatibility.rule import EXTERNAL_MODEL, Rule, is_external_model
from recipe_lib.config.flat_schema import key
from recipe_lib.config.schema import LoraFinetuneConfig


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


# Combinations that are refused. `applies` is true, or not empty, for a config that has one; `reads`
# are further keys that it looks at; `example` are overrides with which the tests try the rule.
_RULES = (
    # These two judge by the format's name, before a sample is read. `list_unused_formats` returns
    # the formats of the config whose samples are not of the kind (pairs, classes) that this recipe
    # trains on; it is empty if the recipe trains on another kind.
    Rule(
        keys=("reward.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "pairs"),
        reason="the loss compares a chosen with a rejected answer, which samples of this format do"
        " not have",
        remedy="set data.format to preference, or reward.loss=classification",
        example=("data.format=alpaca",),
        recipe="reward_distributed",
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("reward.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "classes"),
        reason="samples of this format have no class",
        remedy="set data.format to classification, or reward.loss=pairwise",
        example=("reward.loss=classification", "data.format=preference"),
        recipe="reward_distributed",
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("model.implementation", "reward.loss"),
        applies=is_external_model,
        reason="the score head is one of our own decoder",
        remedy="set model.implementation=native",
        example=(EXTERNAL_MODEL,),
        recipe="reward_distributed",
    ),
    Rule(
        keys=("lora.target_modules", "reward.loss"),
        applies=lambda cfg: "head" in cfg.lora.target_modules,
        # The key is a list of names of linear layers; `head` is the output head's.
        reason="a score head is in the place of the output head, and is trained whole",
        remedy="leave head out of lora.target_modules",
        example=("lora.target_modules=[q, head]",),
        recipe="reward_distributed",
    ),
    Rule(
        keys=("recipe", "qat"),
        applies=lambda cfg: cfg.qat is not None,
        reason="quantized folders are exported of models that predict tokens",
        remedy="remove qat",
        example=("qat=int8",),
        recipe="reward_distributed",
    ),
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
    # The key and the value with which adapters are trained in place of every parameter.
    adapters_instead = {"reward.trainable": "adapters"}
    scores_sequences = True  # the model has a score head in place of its output head
    rules = _RULES

    @property
    def samples(self) -> str:
        return "pairs" if self.reward.loss == "pairwise" else "classes"

    @property
    def num_labels(self) -> int | None:
        return 1 if self.reward.loss == "pairwise" else self.reward.num_labels

    @property
    def own_loss(self) -> str | None:
        return f"the loss of scores is reward.loss, {self.reward.loss}"

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        pair_metrics = ("loss", "reward_chosen", "reward_rejected", "accuracy", "reward_margin")
        metrics = pair_metrics if self.reward.loss == "pairwise" else ("loss", "accuracy")
        return tuple(f"validation_{name}" for name in metrics)
