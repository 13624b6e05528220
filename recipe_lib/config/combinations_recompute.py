"""Combinations with what is computed again, in pieces, or by another kernel of the loss, that are refused."""

from recipe_lib.config.combination import Incompatible

_LORA = "lora_finetune_distributed"
_DPO = "dpo_distributed"
_BUDGET = ("memory.activation_checkpointing=budget", "memory.activation_budget_gib=4")
_KERNEL = "memory.loss_kernel"


def _has_kernel(cfg: object) -> bool:
    return bool(cfg.memory.loss_kernel != "chunked")  # type: ignore[attr-defined]


RECOMPUTE: tuple[Incompatible, ...] = (
    Incompatible(
        "checkpointing under no budget",
        lambda cfg: cfg.memory.activation_checkpointing == "budget" and cfg.memory.activation_budget_gib is None,
        ("memory.activation_checkpointing", "memory.activation_budget_gib"),
        "budget needs to know how much",
        "set memory.activation_budget_gib (GiB), or choose none, selective or full",
        _BUDGET[:1],
    ),
    Incompatible(
        "budget of another checkpointing",
        lambda cfg: cfg.memory.activation_checkpointing != "budget",
        ("memory.activation_checkpointing", "memory.activation_budget_gib"),
        "only checkpointing budget reads it",
        "set memory.activation_checkpointing=budget, or remove memory.activation_budget_gib",
        _BUDGET[1:],
        unread="memory.activation_budget_gib",
    ),
    Incompatible(
        "budget of a model that is not native",
        lambda cfg: (
            cfg.memory.activation_checkpointing == "budget"
            and cfg.memory.activation_budget_gib is not None
            and cfg.model.implementation != "native"
        ),
        ("model.implementation", "memory.activation_checkpointing", "memory.activation_budget_gib"),
        "what its layers keep is found out for the decoder of model.implementation=native alone",
        "choose none, selective or full",
        ("model.implementation=transformers", *_BUDGET),
    ),
    Incompatible(
        "pieces of a model that is not native",
        lambda cfg: cfg.memory.mlp_tiles > 1 and cfg.model.implementation != "native",
        ("model.implementation", "memory.mlp_tiles"),
        "the MLPs of model.implementation=native alone can be computed in pieces",
        "remove memory.mlp_tiles",
        ("model.implementation=transformers", "memory.mlp_tiles=4"),
    ),
    Incompatible(
        "pieces of compiled layers",
        lambda cfg: cfg.memory.mlp_tiles > 1 and cfg.compile,
        ("compile", "memory.mlp_tiles"),
        "compiled code decides itself what it keeps, and would put the pieces' work beside each other again",
        "remove one of the two",
        ("compile=true", "memory.mlp_tiles=4"),
    ),
    Incompatible(
        "another kernel for a loss of its own",
        lambda cfg: _has_kernel(cfg) and cfg.loss != "cross_entropy",
        ("loss", _KERNEL),
        "it computes cross-entropy and nothing else",
        "set memory.loss_kernel=chunked, which takes any loss, or remove loss",
        ("loss=mine", "memory.loss_kernel=torch"),
    ),
    Incompatible(
        "another kernel over a shared vocabulary",
        lambda cfg: _has_kernel(cfg) and cfg.parallel.tensor > 1,
        ("parallel.tensor", _KERNEL),
        "it needs the whole output matrix, of which each rank of a tensor-parallel group has a part",
        "set memory.loss_kernel=chunked, or parallel.tensor=1",
        ("parallel.tensor=2", "memory.loss_kernel=torch"),
    ),
    Incompatible(
        "another kernel for a model that is not native",
        lambda cfg: _has_kernel(cfg) and cfg.model.implementation != "native",
        ("model.implementation", _KERNEL),
        "the output head of model.implementation=native alone chooses its kernel",
        "remove memory.loss_kernel",
        ("model.implementation=transformers", "memory.loss_kernel=torch"),
    ),
    Incompatible(
        "another kernel for an adapted head",
        lambda cfg: _has_kernel(cfg) and "head" in cfg.lora.target_modules,
        ("lora.target_modules", _KERNEL),
        "it multiplies by one matrix, and an adapted head has three",
        "leave head out of lora.target_modules, or set memory.loss_kernel=chunked",
        ("lora.target_modules=[q, head]", "memory.loss_kernel=torch"),
        recipe=_LORA,
    ),
    Incompatible(
        "another kernel for log-probabilities",
        lambda cfg: _has_kernel(cfg) and cfg.dpo is not None,
        (_KERNEL,),
        "preference losses need each token's log-probability, which it does not give",
        "remove memory.loss_kernel",
        ("memory.loss_kernel=torch",),
        recipe=_DPO,
        reads=("dpo.loss",),
    ),
    Incompatible(
        "chunks of another kernel",
        lambda cfg: cfg.memory.loss_kernel == "liger",
        (_KERNEL, "memory.loss_chunks"),
        "liger chooses its pieces itself",
        "remove memory.loss_chunks (~memory.loss_chunks on the command line), or choose another memory.loss_kernel",
        ("memory.loss_kernel=liger", "memory.loss_chunks=16"),
        unread="memory.loss_chunks",
    ),
)
