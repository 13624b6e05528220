"""What `tune doctor` tries out with torch, as steps for processes of their own.

The parts that need a CUDA device are written after torch's documentation and its source; they have never run on one.
What compares numbers is the same code on any device, and is tested with copies that deliver the wrong ones.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from recipe_lib.cli.doctor_apart import Step
from recipe_lib.units import MIB

# Bytes: a word; a page and a word; one and many megabytes with a ragged end. Small ones go through another path.
COPIED = (4, 4100, MIB, 64 * MIB + 12)
LOW_PRECISION = {"int8": (7, 5), "fp8": (8, 9)}  # from which compute capability tensor cores and torch can


def device_steps(rank: int, folder: Path) -> Iterator[Step]:
    """What torch says of itself and the GPUs; then the rates of each GPU, and of a CPU where there is none."""
    found: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        found.update(describe_torch())
        return found

    yield "torch", look
    from recipe_lib.plan.timing.calibrate import calibrate, copy_rates, matmul_rate  # torch, once it is known to start

    gpus = found.get("gpus", [])
    for number in range(len(gpus)):
        device = f"cuda:{number}"
        yield f"copies of GPU {number}", partial(on_device, device, partial(copy_rates, device))
        yield f"matmuls of GPU {number}", partial(on_device, device, partial(matmul_rate, device, "bf16"))
    for name, capability in LOW_PRECISION.items() if gpus else ():
        if tuple(gpus[0]["capability"]) >= capability:
            yield f"{name} matmuls", partial(on_device, "cuda:0", partial(matmul_rate, "cuda:0", name))
    if not gpus:
        import torch

        torch.set_num_threads(1)  # the shapes are tiny
    yield "calibration", partial(calibrate, "cuda" if gpus else "cpu")


def torchao_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Imports torchao, which says itself whether it fits this torch."""

    def load() -> str:
        import torchao

        return torchao.__version__

    yield "torchao", load


def describe_torch() -> dict[str, Any]:
    """Versions that torch was built with, and the GPUs that it sees: name, memory and free bytes, capability; whether
    this torch has kernels for it. error: why torch sees no GPU, as far as it says."""
    import torch

    told: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "nccl": None,
        "built_for": [],
        "gpus": [],
        "error": None,
    }
    if torch.version.cuda is None:
        return told
    module = torch.get_device_module("cuda")
    told["nccl"] = ".".join(map(str, module.nccl.version()))
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:
        told["error"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return told
    told["built_for"] = module.get_arch_list()
    for number in range(module.device_count()):
        capability = module.get_device_capability(number)
        free, total = module.mem_get_info(number)
        gpu = {"name": module.get_device_name(number), "memory": total, "free": free, "capability": list(capability)}
        told["gpus"].append(gpu | {"supported": has_kernels(capability, told["built_for"])})
    return told


def has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a torch built for these (`sm_90`, `compute_90`, with `a` or `f` at the end for one card alone) has
    kernels for a card: of the same generation and not newer, or code that the driver can compile for it."""
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = "".join(letter for letter in number if letter.isdigit())
        if not digits:
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= tuple(capability):
            return True
    return False


def on_device(device: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returns with that GPU as the current one."""
    import torch

    with torch.get_device_module("cuda").device(device):
        return measure()


def peer_steps(rank: int, folder: Path) -> Iterator[Step]:
    """Copies between every two GPUs, in each direction and in both at once."""
    import torch

    count = torch.get_device_module("cuda").device_count()
    for first, second in permutations(range(count), 2):
        yield f"copies from GPU {first} to GPU {second}", partial(copy_between, first, second, both=False)
    for first, second in combinations(range(count), 2):
        name = f"copies between GPU {first} and GPU {second} both ways at once"
        yield name, partial(copy_between, first, second, both=True)


def copy_between(first: int, second: int, *, both: bool) -> dict[str, Any]:
    """{"from", "to", "both", "access": whether the driver says that the second can read the first's memory, "wrong",
    "rate"}, the last two of `verify_copies`."""
    import torch

    access = torch.get_device_module("cuda").can_device_access_peer(second, first)
    there, back = (f"cuda:{first}", f"cuda:{second}"), (f"cuda:{second}", f"cuda:{first}")
    found = verify_copies([there, back] if both else [there])
    return {"from": first, "to": second, "both": both, "access": access, **found}


def verify_copies(
    ways: list[tuple[str, str]], copy: Callable[[Any, Any], None] | None = None, sizes: tuple[int, ...] = COPIED
) -> dict[str, Any]:
    """Copies between devices, all of the ways at once, in several sizes and patterns, each compared on the host.

    copy(target, source): torch's own if None; tests plant another. Returns {"wrong": of each size and pattern that
    arrived otherwise, a line, "rate": bytes a second of the largest, all ways together}.
    """
    import torch

    copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
    wrong: list[str] = []
    rate = 0.0
    for size in sizes:
        for name, sent in patterns(size // 4):
            # What is there before is neither what is sent nor zeros: copies that never happen are seen.
            pairs = [(torch.full_like(sent, 0x5A5A5A5A).to(to), sent.to(where, copy=True)) for where, to in ways]
            _settle(ways)
            start = time.perf_counter()
            for target, source in pairs:
                copy(target, source)
            _settle(ways)
            rate = len(ways) * size / (time.perf_counter() - start)
            for target, _ in pairs:
                arrived = target.cpu()
                if not torch.equal(arrived, sent):
                    other = (arrived != sent).nonzero().flatten()
                    wrong.append(
                        f"{size} bytes of {name}: {len(other)} of {len(sent)} words are others, the first is "
                        f"{int(arrived[other[0]])} where {int(sent[other[0]])} was sent"
                    )
    return {"wrong": wrong, "rate": rate}


@cache
def patterns(words: int) -> tuple[tuple[str, Any], ...]:
    """(name, int32 tensor on the host): noise, zeros, ones, and places, which show what lands elsewhere."""
    import torch

    generator = torch.Generator().manual_seed(words)
    noise = torch.randint(-(2**31), 2**31 - 1, (words,), generator=generator, dtype=torch.int64).to(torch.int32)
    return (
        ("noise", noise),
        ("zeros", torch.zeros(words, dtype=torch.int32)),
        ("ones", torch.full((words,), -1, dtype=torch.int32)),
        ("places", torch.arange(1, words + 1, dtype=torch.int32)),
    )


def _settle(ways: list[tuple[str, str]]) -> None:
    """Waits for all devices that take part."""
    import torch

    for device in {device for way in ways for device in way}:
        if torch.device(device).type != "cpu":
            torch.get_device_module("cuda").synchronize(device)
