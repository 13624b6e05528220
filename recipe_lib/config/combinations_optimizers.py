"""Combinations of optimizers, and of what their states and steps are made of, that are refused."""

from typing import Any

from recipe_lib.config.combination import Incompatible

MASTER = "optimizer.master_weights=true"
BY_CHANCE = "optimizer.stochastic_rounding=true"


def trained_dtype(cfg: Any) -> str:
    """The type of what is trained: the adapters' own, where adapters are."""
    lora, dpo = getattr(cfg, "lora", None), getattr(cfg, "dpo", None)
    if lora is None or (dpo is not None and dpo.trainable == "all"):
        return str(cfg.dtype)
    return str(lora.dtype or cfg.dtype)


def has_own_step(cfg: Any) -> bool:
    """Whether the step is none of torch's, which have several implementations."""
    same = {"bf16": 16, "fp32": 32, "fp64": 64}.get(trained_dtype(cfg))
    of_adamw = cfg.optimizer.master_weights or cfg.optimizer.stochastic_rounding
    of_adamw = of_adamw or cfg.optimizer.state_bits not in (None, same)
    return cfg.optimizer.name == "muon" or (cfg.optimizer.name == "adamw" and of_adamw)


OPTIMIZERS: tuple[Incompatible, ...] = (
    Incompatible(
        "bits of sgd",
        lambda cfg: cfg.optimizer.name == "sgd" and cfg.optimizer.state_bits is not None,
        ("optimizer.name", "optimizer.state_bits"),
        "SGD's momentum, if it has one, is in the weights' type",
        "remove optimizer.state_bits, or choose adamw or muon",
        ("optimizer.name=sgd", "optimizer.state_bits=8"),
    ),
    Incompatible(
        "master weights of sgd",
        lambda cfg: cfg.optimizer.name == "sgd" and cfg.optimizer.master_weights,
        ("optimizer.name", "optimizer.master_weights"),
        "SGD steps the weights themselves",
        "remove optimizer.master_weights, or choose adamw or muon",
        ("optimizer.name=sgd", MASTER),
    ),
    Incompatible(
        "rounding of sgd",
        lambda cfg: cfg.optimizer.name == "sgd" and cfg.optimizer.stochastic_rounding,
        ("optimizer.name", "optimizer.stochastic_rounding"),
        "SGD rounds to the nearest",
        "remove optimizer.stochastic_rounding, or choose adamw or muon",
        ("optimizer.name=sgd", BY_CHANCE),
    ),
    Incompatible(
        "master weights of fp32",
        lambda cfg: cfg.optimizer.master_weights and cfg.optimizer.name != "sgd" and trained_dtype(cfg) != "bf16",
        ("dtype", "optimizer.master_weights"),
        "what is trained is no less exact than fp32 already",
        "remove optimizer.master_weights, or choose bf16",
        ("dtype=fp32", MASTER),
    ),
    Incompatible(
        "rounding of fp32",
        lambda cfg: cfg.optimizer.stochastic_rounding and cfg.optimizer.name != "sgd" and trained_dtype(cfg) != "bf16",
        ("dtype", "optimizer.stochastic_rounding"),
        "only steps of bf16 weights are rounded by chance",
        "remove optimizer.stochastic_rounding, or choose bf16",
        ("dtype=fp32", BY_CHANCE),
    ),
    Incompatible(
        "master weights and rounding",
        lambda cfg: cfg.optimizer.master_weights and cfg.optimizer.stochastic_rounding,
        ("optimizer.master_weights", "optimizer.stochastic_rounding"),
        "each is there so that small steps add up, and fp32 weights need no chance for it",
        "remove one of the two",
        (MASTER, BY_CHANCE),
    ),
    Incompatible(
        "bits of fp64",
        lambda cfg: cfg.optimizer.state_bits is not None and cfg.dtype == "fp64",
        ("dtype", "optimizer.state_bits"),
        "fewer bits would undo what fp64 is for",
        "remove optimizer.state_bits",
        ("dtype=fp64", "optimizer.state_bits=8"),
    ),
    Incompatible(
        "implementation of a step of our own",
        has_own_step,
        ("optimizer.name", "optimizer.state_bits", "optimizer.implementation"),
        "the step is none of torch's, of which there are several implementations",
        "remove optimizer.implementation",
        ("optimizer.state_bits=8", "optimizer.implementation=foreach"),
        unread="optimizer.implementation",
    ),
    Incompatible(
        "fused sgd in bf16 on a cpu",
        lambda cfg: (
            cfg.optimizer.name == "sgd"
            and cfg.optimizer.implementation == "fused"
            and cfg.device == "cpu"
            and trained_dtype(cfg) == "bf16"
        ),
        ("optimizer.name", "optimizer.implementation", "dtype", "device"),
        "torch's kernel leaves most elements of bf16 weights on a CPU as they are",
        "choose auto or foreach",
        ("optimizer.name=sgd", "optimizer.implementation=fused", "device=cpu"),  # bf16 is the default
    ),
)
