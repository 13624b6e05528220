"""Combinations with whole models on every rank (`ddp`) and with matmuls of fewer bits that are refused."""

from typing import Any

from recipe_lib.config.combination import Incompatible

_LORA = "lora_finetune_distributed"
_DDP = "parallel.strategy=ddp"
# Keys that only FSDP reads, and a value that is not their default.
_FSDP = {"data_replicate": "2", "fsdp_wrap_policy": "layers", "reshard_after_forward": "false"}


def _is_ddp(cfg: Any) -> bool:
    return bool(cfg.parallel.strategy == "ddp")


def _has_matmuls(cfg: Any) -> bool:
    return cfg.matmul_dtype is not None


PRECISION: tuple[Incompatible, ...] = (
    Incompatible(
        "shards of whole models",
        lambda cfg: _is_ddp(cfg) and cfg.parallel.data_shard > 1,
        ("parallel.strategy", "parallel.data_shard"),
        "with ddp every data rank has all parameters, and none has shards",
        "remove parallel.data_shard, or choose fsdp",
        (_DDP, "parallel.data_shard=2"),
    ),
    *(
        Incompatible(
            f"parallel.{word} of whole models",
            _is_ddp,
            ("parallel.strategy", f"parallel.{word}"),
            "ddp copies the model to every data rank and gathers nothing",
            f"remove parallel.{word}, or choose fsdp",
            (_DDP, f"parallel.{word}={value}"),
            unread=f"parallel.{word}",
        )
        for word, value in _FSDP.items()
    ),
    Incompatible(
        "whole models in host memory",
        lambda cfg: _is_ddp(cfg) and cfg.memory.cpu_offload,
        ("parallel.strategy", "memory.cpu_offload"),
        "it is FSDP that brings offloaded parameters to the device",
        "remove memory.cpu_offload, or choose fsdp",
        (_DDP, "memory.cpu_offload=true"),
    ),
    Incompatible(
        "fp64 in low-precision matmuls",
        lambda cfg: _has_matmuls(cfg) and cfg.dtype == "fp64",
        ("dtype", "matmul_dtype"),
        "rounding what is multiplied would undo what fp64 is for",
        "remove matmul_dtype, or choose bf16 or fp32",
        ("dtype=fp64", "matmul_dtype=int8"),
    ),
    Incompatible(
        "low-precision matmuls of shared matrices",
        lambda cfg: _has_matmuls(cfg) and cfg.parallel.tensor > 1,
        ("parallel.tensor", "matmul_dtype"),
        "the matmuls of a tensor-parallel group gather and multiply in one, in dtype",
        "remove matmul_dtype, or set parallel.tensor=1",
        ("parallel.tensor=2", "matmul_dtype=int8"),
    ),
    Incompatible(
        "low-precision matmuls of quantized weights",
        lambda cfg: _has_matmuls(cfg) and cfg.lora.quantize_base != "none",
        ("lora.quantize_base", "matmul_dtype"),
        "weights of 4 or 8 bits are multiplied in dtype, since rounding them a second time would lose more",
        "remove one of the two",
        ("lora.quantize_base=nf4", "matmul_dtype=int8"),
        recipe=_LORA,
    ),
    Incompatible(
        "low-precision matmuls of another model's class",
        lambda cfg: _has_matmuls(cfg) and cfg.model.implementation != "native",
        ("model.implementation", "matmul_dtype"),
        "only our own models' linears are known to be safe to round",
        "remove matmul_dtype, or model.implementation",
        ("model.implementation=transformers", "matmul_dtype=int8"),
    ),
    Incompatible(
        "FP8 of fp32",
        lambda cfg: cfg.matmul_dtype == "fp8" and cfg.dtype == "fp32",
        ("dtype", "matmul_dtype"),
        "FP8 matmuls give bf16",
        "set dtype=bf16, or choose int8",
        ("dtype=fp32", "matmul_dtype=fp8"),
    ),
    Incompatible(
        "FP8 on a CPU",
        lambda cfg: cfg.matmul_dtype == "fp8" and cfg.device == "cpu",
        ("device", "matmul_dtype"),
        "FP8 matmuls take a GPU of compute capability 8.9 or more",
        "remove matmul_dtype, or choose int8, which runs anywhere",
        ("device=cpu", "matmul_dtype=fp8"),
    ),
)
