"""Config of the recipe for preference optimization, and its section `dpo`."""

from dataclasses import dataclass, field

from recipe_lib.config.flat_schema import key
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig

UNPAIRED = ("kto", "apo_zero_unpaired")  # losses of single answers
_OF_SINGLE_ANSWERS = f"dpo.loss in {', '.join(UNPAIRED)}"


@dataclass
class DpoConfig:
    """Preference optimization on pairs of answers (DPO, arXiv 2305.18290) or single ones (KTO)."""

    loss: str = key(
        "sigmoid",
        "`sigmoid`: DPO, with label_smoothing conservative DPO; `ipo` (arXiv 2310.12036); `simpo`:"
        " mean log-probabilities, no reference (arXiv 2405.14734); of single answers `kto` (arXiv"
        " 2402.01306) and `apo_zero_unpaired` (arXiv 2408.06266).",
        choices=("sigmoid", "ipo", "simpo", *UNPAIRED),
        known_as="TRL loss_type (DPOConfig, KTOConfig)",
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
        needs="dpo.loss in sigmoid, ipo",
        known_as="TRL reference_free (before 1)",
    )
    desirable_weight: float = key(
        1.0,
        "kto, apo_zero_unpaired: what the loss of an answer that is wanted counts.",
        minimum=0,
        needs=_OF_SINGLE_ANSWERS,
        known_as="TRL KTOConfig.desirable_weight",
    )
    undesirable_weight: float = key(
        1.0,
        "kto, apo_zero_unpaired: what the loss of an answer that is not wanted counts.",
        minimum=0,
        needs=_OF_SINGLE_ANSWERS,
        known_as="TRL KTOConfig.undesirable_weight",
    )
    trainable: str = key(
        "adapters",
        "`adapters`: the reference is the model without them; `all`: every parameter, the reference"
        " is a frozen second copy.",
        choices=("adapters", "all"),
        known_as="LLaMA-Factory finetuning_type",
    )

    @property
    def takes_single_answers(self) -> bool:
        """Whether a sample of the loss is an answer with a label, not a pair."""
        return self.loss in UNPAIRED

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "simpo" and not self.reference_free


@dataclass
class DpoFinetuneConfig(LoraFinetuneConfig):
    """Config of `dpo_distributed`."""

    recipe: str = key(
        "dpo_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    dpo: DpoConfig = field(default_factory=DpoConfig)
    adapters_instead = {"dpo.trainable": "adapters"}

    @property
    def samples(self) -> str:
        """A chosen answer and a rejected one, or single answers, as the loss takes them."""
        return "labeled answers" if self.dpo.takes_single_answers else "pairs"

    @property
    def compares_mismatched(self) -> bool:
        """KTO's point of reference is what they give."""
        return self.dpo.loss == "kto"

    @property
    def own_loss(self) -> str | None:
        """That of `dpo.loss`."""
        what = "answers" if self.dpo.takes_single_answers else "pairs"
        return f"the loss of {what} is dpo.loss, {self.dpo.loss}"

    @property
    def runs_reference(self) -> bool:
        """As the loss needs one."""
        return self.dpo.needs_reference

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        """Means over all pairs, or answers."""
        rewards = ["chosen", "rejected", "margin"] + (
            [] if self.dpo.takes_single_answers else ["accuracy"]
        )
        numbers = [
            "loss",
            *(f"reward_{name}" for name in rewards),
            *(["kl"] if self.compares_mismatched else []),
        ]
        return tuple(f"validation_{name}" for name in numbers)
