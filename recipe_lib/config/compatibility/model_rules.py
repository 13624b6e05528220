"""Rules of the model, its dtype, the optimizer and the output folder."""

from recipe_lib.config.compatibility.rule import Rule
from recipe_lib.config.key_conditions import get_trained_dtype

MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("model.path", "model.preset"),
        applies=lambda cfg: cfg.model.path is None and cfg.model.preset is None,
        reason="neither is set",
        remedy=(
            "set model.path to a checkpoint, or model.preset to an architecture with random weights"
        ),
        example=("~model.path",),
    ),
    Rule(
        keys=("model.path", "model.preset"),
        applies=lambda cfg: cfg.model.path is not None and cfg.model.preset is not None,
        reason="both are set",
        remedy=(
            "keep one: model.path trains a checkpoint, model.preset starts from random weights"
            " (~KEY removes KEY)"
        ),
        example=("model.preset=llama3/8B",),
    ),
    Rule(
        keys=("model.preset", "tokenizer.path"),
        applies=lambda cfg: (
            cfg.model.path is None and cfg.model.preset is not None and cfg.tokenizer.path is None
        ),
        reason="an architecture brings no tokenizer",
        remedy="set tokenizer.path to a folder or file that has one",
        example=("~model.path", "model.preset=llama3/8B"),
    ),
    Rule(
        keys=("dtype", "device"),
        applies=lambda cfg: cfg.dtype == "fp64" and cfg.device == "cuda",
        reason=(
            "fp64 is for checks of the arithmetic on a CPU; no attention kernel of a GPU takes it"
        ),
        remedy="choose bf16 or fp32, or device=cpu",
        example=("dtype=fp64", "device=cuda"),
    ),
    Rule(
        keys=("dtype", "parallel.reduce_dtype"),
        applies=lambda cfg: cfg.dtype == "fp64" and cfg.parallel.reduce_dtype is not None,
        reason="summing in a lower precision would undo what fp64 is for",
        remedy="remove parallel.reduce_dtype",
        example=("dtype=fp64", "parallel.reduce_dtype=fp32"),
    ),
    Rule(
        keys=(
            "parallel.accumulate_grad_in_fp32",
            "parallel.reduce_gradients",
            "parallel.reduce_dtype",
        ),
        applies=lambda cfg: (
            cfg.parallel.accumulate_grad_in_fp32
            and cfg.parallel.reduce_gradients == "step"
            and cfg.parallel.reduce_dtype == "bf16"
        ),
        reason=(
            "FSDP reduces once a step what it has added up, in the dtype that it has added up in"
        ),
        remedy=(
            "remove parallel.reduce_dtype (fp32 is reduced), or parallel.accumulate_grad_in_fp32"
        ),
        example=(
            "parallel.accumulate_grad_in_fp32=true",
            "parallel.reduce_gradients=step",
            "parallel.reduce_dtype=bf16",
            "gradient_accumulation_steps=2",
        ),
    ),
    Rule(
        keys=("resume", "overwrite_output_dir"),
        applies=lambda cfg: cfg.resume is not None and cfg.overwrite_output_dir,
        reason="one goes on from what output_dir holds, the other replaces it",
        remedy="remove one of the two",
        example=("resume=latest", "overwrite_output_dir=true"),
    ),
    Rule(
        keys=("optimizer.master_weights", "optimizer.stochastic_rounding"),
        applies=lambda cfg: cfg.optimizer.master_weights and cfg.optimizer.stochastic_rounding,
        reason=(
            "each is there so that small steps add up, and fp32 weights need no stochastic rounding"
            " for it"
        ),
        remedy="remove one of the two",
        example=("optimizer.master_weights=true", "optimizer.stochastic_rounding=true"),
    ),
    Rule(
        keys=("dtype", "optimizer.state_bits"),
        applies=lambda cfg: cfg.optimizer.state_bits is not None and cfg.dtype == "fp64",
        reason="fewer bits would undo what fp64 is for",
        remedy="remove optimizer.state_bits",
        example=("dtype=fp64", "optimizer.state_bits=8"),
    ),
    Rule(
        keys=("optimizer.name", "optimizer.implementation", "dtype", "device"),
        applies=lambda cfg: (
            cfg.optimizer.name == "sgd"
            and cfg.optimizer.implementation == "fused"
            and cfg.device == "cpu"
            and get_trained_dtype(cfg) == "bf16"
        ),
        reason="torch's kernel leaves most elements of bf16 weights on a CPU as they are",
        remedy="choose auto or foreach",
        example=("optimizer.name=sgd", "optimizer.implementation=fused", "device=cpu"),
    ),
)

# The load-balancing loss of a mixture of experts is computed in each layer's forward.
ROUTER_LOSS_RULES: tuple[Rule, ...] = (
    Rule(
        keys=("router_aux_loss_coef", "memory.mlp_tiles"),
        applies=lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.memory.mlp_tiles > 1,
        reason="the loss is one of all tokens of a micro-batch, of which tiles know a part",
        remedy="set router_aux_loss_coef=0, or memory.mlp_tiles=1",
        example=("router_aux_loss_coef=0.01", "memory.mlp_tiles=2"),
    ),
    Rule(
        keys=("router_aux_loss_coef", "compile"),
        applies=lambda cfg: cfg.router_aux_loss_coef > 0 and cfg.compile,
        reason="compiled layers do not add to the loss",
        remedy="set router_aux_loss_coef=0, or compile=false",
        example=("router_aux_loss_coef=0.01", "compile=true"),
    ),
)
