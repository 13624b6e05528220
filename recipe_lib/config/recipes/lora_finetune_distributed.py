"""Config of the recipe that trains adapters."""

from dataclasses import dataclass, field
from operator import attrgetter

from recipe_lib.config.flat_schema import key
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig


@dataclass
class LoraFinetuneConfig(FullFinetuneConfig):
    """Config of `lora_finetune_distributed`."""

    recipe: str = key(
        "lora_finetune_distributed",
        "The recipe this config is for.",
        known_as="torchtune: the first word of `tune run`",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def trained_adapters(self) -> LoraConfig | None:
        """Those of the section, unless a key of the recipe's (`adapters_instead`) says to train
        every parameter.
        """
        for name, value in self.adapters_instead.items():
            if attrgetter(name)(self) != value:
                return None
        return self.lora
