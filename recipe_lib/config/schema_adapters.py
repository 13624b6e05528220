"""The sections about adapters and preference pairs."""

from dataclasses import dataclass

from recipe_lib.config import idle
from recipe_lib.config.keys import key

# The linears of a native model's layers, and what PEFT's files call the parts that may have an adapter.
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
PEFT_NAMES = {name: f"{name}_proj" for name in LINEARS} | {"embedding": "embed_tokens", "head": "lm_head"}
# Of a mixture of experts, whose parameters PEFT finds by target_parameters.
MIXTURE_TARGETS = ("router", "experts")
_SHORT_NAMES = {long: short for short, long in PEFT_NAMES.items()}


@dataclass
class LoraConfig:
    """Adapters: trained low-rank matrices added to frozen weights (LoRA, arXiv 2106.09685)."""

    rank: int = key(
        16,
        "Rank of the two matrices.",
        minimum=1,
        most=2**16,
        needs=idle.trains_adapters,
        known_as="PEFT r; torchtune lora_rank",
    )
    alpha: float = key(
        32.0,
        "The product is multiplied by alpha / rank.",
        above=0,
        needs=idle.trains_adapters,
        known_as="PEFT lora_alpha",
    )
    dropout: float = key(
        0.0,
        "Share of the adapter's inputs set to zero in training.",
        minimum=0,
        below=1,
        needs=idle.trains_adapters,
        known_as="PEFT lora_dropout",
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "What gets an adapter: q, k, v, o, gate, up, down, embedding, head (or q_proj, ..., embed_tokens, lm_head, "
        "which "
        "mean the same), of a mixture of experts router and experts (each expert's factors are its own), `all-linear`: "
        "every linear of the layers, which routers and experts are not; of a model that is not native, ends of its "
        "linears' names, as `c_attn`.",
        needs=idle.trains_adapters,
        known_as="PEFT target_modules",
    )
    rslora: bool = key(
        False,
        "Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732).",
        needs=idle.trains_adapters,
        known_as="PEFT use_rslora",
    )
    dora: bool = key(
        False,
        "Also train the length of each output's weights (DoRA, arXiv 2402.09353).",
        needs=idle.trains_adapters,
        known_as="PEFT use_dora",
    )
    quantize_base: str = key(
        "none",
        "Store the layers' frozen weights in 4 bits (`nf4`, arXiv 2305.14314) or 8.",
        choices=("none", "nf4", "int8"),
        needs=idle.trains_adapters,
        known_as="torchtune quantize_base; HF load_in_4bit",
    )
    dtype: str | None = key(
        None,
        "Type of the adapters' weights; null: dtype.",
        choices=("fp32", "bf16"),
        needs=idle.trains_adapters,
        known_as="PEFT autocast_adapter_dtype",
    )
    adapter_path: str | None = key(
        None,
        "Folder of a PEFT adapter to go on training; null: a new one.",
        path=True,
        needs=idle.trains_adapters,
        known_as="Axolotl lora_model_dir; LLaMA-Factory adapter_name_or_path",
    )
    merge_on_save: bool = key(
        False,
        "At the end also write the model with the adapter merged in, as output_dir/model.",
        needs=(idle.trains_adapters, "checkpoint.save_model"),
        known_as="PEFT merge_and_unload",
    )

    def __post_init__(self) -> None:
        """Each target under one name, so that two configs that mean the same are the same."""
        named = [_SHORT_NAMES.get(name, name) for name in self.target_modules]
        if "all-linear" in named:
            named = ["all-linear", *(name for name in named if name not in LINEARS)]
        self.target_modules = list(dict.fromkeys(named))

    @property
    def targets(self) -> list[str]:
        """The short names of a native model's targets, `all-linear` taken apart."""
        rest = [name for name in self.target_modules if name != "all-linear"]
        return [*LINEARS, *rest] if len(rest) < len(self.target_modules) else rest
