"""List the refused combinations (`Rule`) of levers, keys that trade time for memory.

`table.py` joins them to the table of all rules. Streamed layers are layers in host memory, each on
the device while it runs (`memory.stream_layers`).
"""

from typing import Any

from recipe_lib.config.compatibility.rule import EXTERNAL_MODEL, Rule, is_external_model

# Overrides that streaming trained layers needs: a step in backward, and states on the host.
_OFFLOADED_IN_BACKWARD = (
    "memory.optimizer_in_backward=true",
    "memory.optimizer_offload=true",
    "clip_grad_norm=null",
)
# optimizer_in_backward refuses gradient_accumulation_steps > 1 by another rule, so that the
# micro-batches of the example's pipeline come from batch_size.
_TWO_STAGES_WITHOUT_ACCUMULATION = (
    "parallel.pipeline=2",
    "batch_size=4",
    "parallel.pipeline_microbatches=4",
)


def _streams_trained_layers(cfg: Any) -> bool:
    # With adapters the layers are frozen.
    return bool(cfg.memory.stream_layers) and getattr(cfg, "trained_adapters", None) is None


def _steps_offloaded_in_backward(cfg: Any) -> bool:
    return cfg.memory.optimizer_in_backward and cfg.memory.optimizer_offload


MEMORY_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("clip_grad_norm", "memory.optimizer_in_backward"),
        applies=lambda cfg: cfg.memory.optimizer_in_backward and cfg.clip_grad_norm is not None,
        reason="a parameter is stepped before the norm of all gradients is known",
        remedy=(
            "set clip_grad_norm=null (the norm is logged all the same), or remove"
            " memory.optimizer_in_backward"
        ),
        example=("memory.optimizer_in_backward=true",),
    ),
    Rule(
        keys=("gradient_accumulation_steps", "memory.optimizer_in_backward"),
        applies=lambda cfg: (
            cfg.memory.optimizer_in_backward and cfg.gradient_accumulation_steps > 1
        ),
        reason="each backward would be a separate step",
        remedy=(
            "set gradient_accumulation_steps=1 (batch_size has the sequences), or remove"
            " memory.optimizer_in_backward"
        ),
        example=(
            "memory.optimizer_in_backward=true",
            "clip_grad_norm=null",
            "gradient_accumulation_steps=2",
        ),
    ),
    Rule(
        keys=("memory.optimizer_in_backward", "parallel.pipeline"),
        applies=lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.pipeline > 1,
        reason="a pipeline adds up the gradients of several micro-batches",
        remedy="remove one of the two",
        example=(
            "memory.optimizer_in_backward=true",
            "clip_grad_norm=null",
            *_TWO_STAGES_WITHOUT_ACCUMULATION,
        ),
    ),
    Rule(
        keys=("memory.optimizer_in_backward", "parallel.strategy"),
        applies=lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.strategy == "ddp",
        reason="replicas sum their gradients once a step, after backward",
        remedy="set parallel.strategy=fsdp, or remove memory.optimizer_in_backward",
        example=(
            "memory.optimizer_in_backward=true",
            "clip_grad_norm=null",
            "parallel.strategy=ddp",
        ),
    ),
    Rule(
        keys=("memory.optimizer_in_backward", "parallel.data_replicate"),
        applies=lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.data_replicate > 1,
        reason=(
            "FSDP holds what it sums over copies of the model to the end of backward, so that no"
            " gradient would be freed"
        ),
        remedy="set parallel.data_replicate=1, or remove memory.optimizer_in_backward",
        example=(
            "memory.optimizer_in_backward=true",
            "clip_grad_norm=null",
            "parallel.data_replicate=2",
        ),
    ),
    Rule(
        keys=("memory.activation_checkpointing", "memory.activation_offload"),
        applies=lambda cfg: (
            cfg.memory.activation_offload
            and cfg.memory.activation_checkpointing in ("selective", "budget")
        ),
        reason=(
            "selective and budget keep their tensors outside the saved-tensor hooks, on the device"
        ),
        remedy="choose full (each layer's input is sent) or none (all that it keeps is sent)",
        example=("memory.activation_checkpointing=selective", "memory.activation_offload=true"),
    ),
    Rule(
        keys=("memory.activation_checkpointing", "memory.activation_budget_gib"),
        applies=lambda cfg: (
            cfg.memory.activation_checkpointing == "budget"
            and cfg.memory.activation_budget_gib is None
        ),
        reason="budget needs to know how much",
        remedy="set memory.activation_budget_gib (GiB), or choose none, selective or full",
        example=("memory.activation_checkpointing=budget",),
    ),
    Rule(
        keys=(
            "model.implementation",
            "memory.activation_checkpointing",
            "memory.activation_budget_gib",
        ),
        applies=lambda cfg: (
            is_external_model(cfg)
            and cfg.memory.activation_checkpointing == "budget"
            and cfg.memory.activation_budget_gib is not None
        ),
        reason=(
            "what its layers keep is found out for the decoder of model.implementation=native alone"
        ),
        remedy="choose none, selective or full",
        example=(
            EXTERNAL_MODEL,
            "memory.activation_checkpointing=budget",
            "memory.activation_budget_gib=4",
        ),
    ),
    Rule(
        keys=("model.implementation", "memory.mlp_tiles"),
        applies=lambda cfg: cfg.memory.mlp_tiles > 1 and is_external_model(cfg),
        reason="the MLPs of model.implementation=native alone can be computed in pieces",
        remedy="remove memory.mlp_tiles",
        example=(EXTERNAL_MODEL, "memory.mlp_tiles=4"),
    ),
    Rule(
        keys=("compile", "memory.mlp_tiles"),
        applies=lambda cfg: cfg.memory.mlp_tiles > 1 and cfg.compile,
        reason=(
            "compiled code decides itself what it keeps, and could compute the tiles together again"
        ),
        remedy="remove one of the two",
        example=("compile=true", "memory.mlp_tiles=4"),
    ),
)

# About trained layers alone: frozen ones, as with adapters, may always be streamed.
STREAMING_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("memory.stream_layers", "memory.optimizer_in_backward", "memory.optimizer_offload"),
        applies=lambda cfg: _streams_trained_layers(cfg) and not _steps_offloaded_in_backward(cfg),
        reason=(
            "a trained layer has to be stepped while it is on the device, and its states not to"
            " stay there"
        ),
        remedy=(
            "set memory.optimizer_in_backward=true memory.optimizer_offload=true"
            " clip_grad_norm=null, or use memory.cpu_offload"
        ),
        example=("memory.stream_layers=true",),
    ),
    Rule(
        keys=("memory.stream_layers", "parallel.tensor"),
        applies=lambda cfg: (
            _streams_trained_layers(cfg)
            and _steps_offloaded_in_backward(cfg)
            and cfg.parallel.tensor > 1
        ),
        reason=(
            "the gradients of norms are summed over a tensor-parallel group after backward, when"
            " their layer is gone"
        ),
        remedy="set parallel.tensor=1, or use memory.cpu_offload",
        example=("memory.stream_layers=true", "parallel.tensor=2", *_OFFLOADED_IN_BACKWARD),
    ),
    Rule(
        keys=("memory.stream_layers", "optimizer.name"),
        applies=lambda cfg: (
            _streams_trained_layers(cfg)
            and _steps_offloaded_in_backward(cfg)
            and cfg.optimizer.name == "muon"
        ),
        reason="its step takes a matrix whole, whose parts it shares out among the ranks",
        remedy="choose adamw or sgd, or use memory.cpu_offload",
        example=("memory.stream_layers=true", "optimizer.name=muon", *_OFFLOADED_IN_BACKWARD),
    ),
)
