"""Whether the kernel of `memory.loss_kernel` can compute the summed loss of a model's output head."""

import torch
from torch import nn

from recipe_lib.config.local_files import no_liger
from recipe_lib.errors import ConfigError
from recipe_lib.models.decoder import OutputHead
from recipe_lib.ops.device import holds_values, kernels_of
from recipe_lib.ops.loss_kernels import has_liger, has_torch_kernel


def check_loss_kernel(model: nn.Module, kernel: str, device: torch.device) -> None:
    """Raises ConfigError where this torch, this machine or the model does not have what the kernel takes.

    device: the one that the head will run on. `chunked` runs everywhere.
    """
    if kernel == "chunked":
        return
    head = getattr(model, "lm_head", None)
    softcap = getattr(head, "softcap", None)
    if kernel == "torch" and not has_torch_kernel():
        raise _error(kernel, f"with torch {torch.__version__}, which has no chunked linear_cross_entropy")
    if kernel == "torch" and softcap is not None:
        raise _error(kernel, f"for a model that caps its logits at {softcap:g}", "chunked or liger")
    if kernel == "liger" and kernels_of(device) != "cuda":
        raise _error(kernel, f"on a device of type {device.type}, where its kernels do not run")
    if kernel == "liger" and holds_values(device) and not has_liger():
        raise ConfigError(no_liger())
    if head is None:  # another stage of a pipeline has it
        return
    if type(head) is not OutputHead:
        raise _error(kernel, f"for an output head of class {type(head).__name__}")


def _error(kernel: str, why: str, others: str = "chunked") -> ConfigError:
    return ConfigError(f"memory.loss_kernel: found {kernel} {why}, expected {others}; set memory.loss_kernel=chunked")
