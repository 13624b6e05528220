"""Combinations with an optimizer that steps in backward, or whose states wait in host memory, that are refused."""

from recipe_lib.config.combination import Incompatible

IN_BACKWARD = "memory.optimizer_in_backward=true"

STEPPING: tuple[Incompatible, ...] = (
    Incompatible(
        "clipping behind a step in backward",
        lambda cfg: cfg.memory.optimizer_in_backward and cfg.clip_grad_norm is not None,
        ("clip_grad_norm", "memory.optimizer_in_backward"),
        "a parameter is stepped before the norm of all gradients is known",
        "set clip_grad_norm=null (the norm is logged all the same), or remove memory.optimizer_in_backward",
        (IN_BACKWARD,),
    ),
    Incompatible(
        "accumulation of gradients that are gone",
        lambda cfg: cfg.memory.optimizer_in_backward and cfg.gradient_accumulation_steps > 1,
        ("gradient_accumulation_steps", "memory.optimizer_in_backward"),
        "each backward would be a step of its own",
        "set gradient_accumulation_steps=1 (batch_size has the rows), or remove memory.optimizer_in_backward",
        (IN_BACKWARD, "clip_grad_norm=null", "gradient_accumulation_steps=2"),
    ),
    Incompatible(
        "pipeline of an optimizer in backward",
        lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.pipeline > 1,
        ("memory.optimizer_in_backward", "parallel.pipeline"),
        "a pipeline adds up the gradients of several micro-batches",
        "remove one of the two",
        (IN_BACKWARD, "clip_grad_norm=null", "parallel.pipeline=2", "batch_size=4", "parallel.pipeline_microbatches=4"),
    ),
    Incompatible(
        "replicas of an optimizer in backward",
        lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.strategy == "ddp",
        ("memory.optimizer_in_backward", "parallel.strategy"),
        "replicas sum their gradients once a step, behind backward",
        "set parallel.strategy=fsdp, or remove memory.optimizer_in_backward",
        (IN_BACKWARD, "clip_grad_norm=null", "parallel.strategy=ddp"),
    ),
    Incompatible(
        "copies of an optimizer in backward",
        lambda cfg: cfg.memory.optimizer_in_backward and cfg.parallel.data_replicate > 1,
        ("memory.optimizer_in_backward", "parallel.data_replicate"),
        "FSDP holds what it sums over copies of the model to the end of backward, so that no gradient would be freed",
        "set parallel.data_replicate=1, or remove memory.optimizer_in_backward",
        (IN_BACKWARD, "clip_grad_norm=null", "parallel.data_replicate=2"),
    ),
    Incompatible(
        "states offloaded twice",
        lambda cfg: cfg.memory.optimizer_offload and cfg.memory.cpu_offload,
        ("memory.cpu_offload", "memory.optimizer_offload"),
        "with cpu_offload the states are in host memory already, and are stepped there",
        "remove one of the two",
        ("memory.optimizer_offload=true", "memory.cpu_offload=true"),
    ),
    Incompatible(
        "states offloaded on a CPU",
        lambda cfg: cfg.memory.optimizer_offload and cfg.device == "cpu",
        ("device", "memory.optimizer_offload"),
        "on a CPU everything is in host memory already",
        "remove memory.optimizer_offload",
        ("device=cpu", "memory.optimizer_offload=true"),
    ),
)
