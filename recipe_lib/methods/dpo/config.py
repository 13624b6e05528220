"""Define the config of `dpo_distributed`, which trains by preference optimization.

`DpoConfig` is its section `dpo`, `_RULES` are the combinations of keys that are refused, and
`DpoFinetuneConfig` is the whole, with the facts that the library asks of every recipe's config
class (`config.schema.RecipeFacts`). A field is declared by `key(default, help, limits...)`; users
see the text `help`. Imports no torch, so that configs are checked without it.
"""

from dataclasses import dataclass, field

from recipe_lib.config.compatibility.data_rules import FORMAT_KEYS, list_unused_formats
from recipe_lib.config.compatibility.rule import Rule
from recipe_lib.config.flat_schema import key
from recipe_lib.config.schema import LoraFinetuneConfig

UNPAIRED = ("kto", "apo_zero_unpaired")  # losses of single answers
# The condition under which a key of these losses has an effect.
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
        """Return True if a sample of the loss is an answer with a label, not a pair."""
        return self.loss in UNPAIRED

    @property
    def takes_mean_logps(self) -> bool:
        """Return True if an answer counts by the mean over its tokens, not by their sum."""
        return self.loss in ("ipo", "simpo")

    @property
    def needs_reference(self) -> bool:
        return self.loss != "simpo" and not self.reference_free


# Combinations that are refused. `applies` is not empty for a config that has one; `reads` are
# further keys that it looks at; `example` are overrides with which the tests try the rule. Both
# judge by the format's name, before a sample is read: `list_unused_formats` returns the formats of
# the config whose samples are not of the kind (pairs, labeled answers) that this recipe trains on;
# it is empty if the recipe trains on another kind.
_RULES = (
    Rule(
        keys=("dpo.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "pairs"),
        reason="the loss compares a chosen with a rejected answer, which samples of this format do"
        " not have",
        remedy="set data.format to preference",
        example=("data.format=alpaca",),
        recipe="dpo_distributed",
        reads=FORMAT_KEYS,
    ),
    Rule(
        keys=("dpo.loss", "data.format"),
        applies=lambda cfg: list_unused_formats(cfg, "labeled answers"),
        reason="the loss is one of answers that are wanted or not, which samples of this format do"
        " not say",
        remedy="set data.format to kto, or to preference, whose pairs are taken apart",
        example=("dpo.loss=kto", "data.format=alpaca"),
        recipe="dpo_distributed",
        reads=FORMAT_KEYS,
    ),
)


@dataclass
class DpoFinetuneConfig(LoraFinetuneConfig):
    """Config of `dpo_distributed`."""

    recipe: str = key(
        "dpo_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    dpo: DpoConfig = field(default_factory=DpoConfig)
    # The key and the value with which adapters are trained in place of every parameter.
    adapters_instead = {"dpo.trainable": "adapters"}
    # Keys that change which models and tensors a step has; the others change values alone.
    memory_keys = (
        "dpo.loss",
        "dpo.reference_free",
        "dpo.desirable_weight",
        "dpo.undesirable_weight",
        "dpo.trainable",
    )
    rules = _RULES
    # What other tools call these keys, parted by spaces, for the hint of an error.
    key_aliases = {
        "dpo": "rl preference dpo_config pref",
        "dpo.beta": "dpo_beta pref_beta rl_beta beta",
        "dpo.loss": "pref_loss dpo_loss loss_type",
        "dpo.label_smoothing": "dpo_label_smoothing label_smoothing",
        "dpo.simpo_gamma": "cpo_simpo_gamma gamma dpo.margin",
        "dpo.trainable": "finetuning_type dpo.train",
        "dpo.reference_free": "rl_reference_free",
    }
    # What other tools call the section.
    section_aliases = {"rl": "dpo", "preference": "dpo", "dpo_config": "dpo"}
    # Of the names above those that mean something else in other recipes.
    ambiguous_names = frozenset(
        ("loss_type", "label_smoothing", "beta", "gamma", "finetuning_type")
    )

    @property
    def samples(self) -> str:
        return "labeled answers" if self.dpo.takes_single_answers else "pairs"

    @property
    def compares_mismatched(self) -> bool:
        return self.dpo.loss == "kto"

    @property
    def own_loss(self) -> str | None:
        samples = "answers" if self.dpo.takes_single_answers else "pairs"
        return f"the loss of {samples} is dpo.loss, {self.dpo.loss}"

    @property
    def runs_reference(self) -> bool:
        return self.dpo.needs_reference

    @property
    def validation_numbers(self) -> tuple[str, ...]:
        metrics = ["loss", "reward_chosen", "reward_rejected", "reward_margin"]
        if not self.dpo.takes_single_answers:  # the share of pairs whose better answer wins
            metrics.append("reward_accuracy")
        if self.compares_mismatched:
            metrics.append("kl")
        return tuple(f"validation_{name}" for name in metrics)
