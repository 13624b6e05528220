"""Combinations with tensor parallel that are refused."""

from recipe_lib.config.combination import Incompatible

_LORA = "lora_finetune_distributed"
_WHOLE = ("embedding", "head")

TENSOR: tuple[Incompatible, ...] = (
    Incompatible(
        "rows that the ranks of a group cannot share",
        lambda cfg: cfg.max_seq_len % cfg.parallel.tensor != 0,
        ("parallel.tensor", "max_seq_len"),
        "each rank has as many tokens of a row as the others, and max_seq_len is no multiple of parallel.tensor",
        "make max_seq_len a multiple of it",
        ("parallel.tensor=2", "max_seq_len=1023"),
    ),
    Incompatible(
        "a loss of its own over a shared vocabulary",
        lambda cfg: cfg.parallel.tensor > 1 and cfg.loss != "cross_entropy",
        ("parallel.tensor", "loss"),
        "it is called with the logits of the whole vocabulary, which no rank has",
        "remove loss, or set parallel.tensor=1",
        ("parallel.tensor=2", "loss=mine"),
    ),
    Incompatible(
        "recomputed gathers without tensor parallel",
        lambda cfg: cfg.parallel.tensor == 1,
        ("parallel.tensor", "parallel.tensor_regather_in_backward"),
        "with one rank nothing is gathered",
        "remove parallel.tensor_regather_in_backward, or set parallel.tensor",
        ("parallel.tensor_regather_in_backward=true",),
        unread="parallel.tensor_regather_in_backward",
    ),
    Incompatible(
        "copied kv heads without tensor parallel",
        lambda cfg: cfg.parallel.tensor == 1,
        ("parallel.tensor", "parallel.tensor_replicate_kv_heads"),
        "with one rank there is nobody to copy to",
        "remove parallel.tensor_replicate_kv_heads, or set parallel.tensor",
        ("parallel.tensor_replicate_kv_heads=true",),
        unread="parallel.tensor_replicate_kv_heads",
    ),
    Incompatible(
        "DoRA over shared matrices",
        lambda cfg: cfg.parallel.tensor > 1 and cfg.lora.dora,
        ("parallel.tensor", "lora.dora"),
        "the lengths of a matrix' rows are not taken over the ranks that share them",
        "set lora.dora=false (LoRA), or parallel.tensor=1",
        ("parallel.tensor=2", "lora.dora=true"),
        recipe=_LORA,
    ),
    Incompatible(
        "adapters of a shared vocabulary",
        lambda cfg: cfg.parallel.tensor > 1 and any(target in _WHOLE for target in cfg.lora.target_modules),
        ("parallel.tensor", "lora.target_modules"),
        "adapters of embedding and head are not shared by the vocabulary",
        "leave embedding and head out of lora.target_modules, or set parallel.tensor=1",
        ("parallel.tensor=2", "lora.target_modules=[q, head]"),
        recipe=_LORA,
    ),
)
