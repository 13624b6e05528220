"""Config of the recipe for preference optimization, and its section `dpo`."""

from dataclasses import dataclass, field

from recipe_lib.config.keys import key
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import LoraConfig


@dataclass
class DpoConfig:
    """Preference optimization on pairs of a chosen and a rejected answer (DPO, arXiv 2305.18290)."""

    loss: str = key(
        "sigmoid",
        "`sigmoid`: DPO, with label_smoothing conservative DPO; `ipo` (arXiv 2310.12036); `simpo`: mean "
        "log-probabilities, no reference (arXiv 2405.14734).",
        choices=("sigmoid", "ipo", "simpo"),
        known_as="TRL DPOConfig.loss_type",
    )
    beta: float = key(
        0.1,
        "How strongly the model is held to the reference (simpo: scale of the reward).",
        above=0,
        known_as="TRL beta",
    )
    label_smoothing: float = key(
        0.0,
        "sigmoid: share of pairs taken to be the wrong way round.",
        minimum=0,
        below=0.5,
        needs="dpo.loss = sigmoid",
        known_as="TRL DPOConfig.label_smoothing",
    )
    simpo_gamma: float = key(
        0.5,
        "simpo: least difference of rewards (gamma).",
        minimum=0,
        needs="dpo.loss = simpo",
        known_as="TRL simpo_gamma",
    )
    reference_free: bool = key(
        False,
        "sigmoid, ipo: take a reference that finds both answers equally likely.",
        needs="dpo.loss != simpo",
        known_as="TRL reference_free (before 1)",
    )
    trainable: str = key(
        "adapters",
        "`adapters`: the reference is the model without them; `all`: every parameter, the reference is a frozen "
        "second copy.",
        choices=("adapters", "all"),
        known_as="LLaMA-Factory finetuning_type",
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "simpo" and not self.reference_free


@dataclass
class DpoFinetuneConfig(LoraFinetuneConfig):
    """Config of `dpo_distributed`."""

    recipe: str = key(
        "dpo_distributed", "The recipe this config is for.", known_as="torchtune: the first word of `tune run`"
    )
    dpo: DpoConfig = field(default_factory=DpoConfig)

    @property
    def trains_on_pairs(self) -> bool:
        """A chosen answer and a rejected one."""
        return True

    @property
    def own_loss(self) -> str | None:
        """That of `dpo.loss`."""
        return f"the loss of pairs is dpo.loss, {self.dpo.loss}"

    @property
    def trained_adapters(self) -> LoraConfig | None:
        """As `dpo.trainable` says."""
        return self.lora if self.dpo.trainable == "adapters" else None

    @property
    def adapters_instead(self) -> dict[str, str]:
        """As everywhere."""
        return {"dpo.trainable": "adapters"}

    @property
    def runs_reference(self) -> bool:
        """As the loss needs one."""
        return self.dpo.needs_reference

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        """Means over all pairs."""
        rewards = ("chosen", "rejected", "accuracy", "margin")
        return ("validation_loss", *(f"validation_reward_{name}" for name in rewards))

    @property
    def sums_losses(self) -> bool:
        """Log-probabilities of tokens."""
        return False
