"""A warning where a run will crawl: a type that the CPU has no instructions for."""

import time

import torch

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.logs import get_logger
from recipe_lib.parallel import DTYPES, World
from recipe_lib.units import format_count

SIZE = 256  # rows and columns of the products that are timed
PRODUCTS = 6  # the first one is slower
ENOUGH_SECONDS = 0.03  # of products of one type
SLOWER = 5.0  # times fp32; less is no reason to warn


def warn_of_slow_dtype(cfg: FullFinetuneConfig, world: World) -> None:
    """On the main rank of a run on CPUs in bf16 or fp16: a line if products of matrices are far slower than in fp32.

    Without instructions for them (avx512_bf16, amx_bf16; avx512_fp16) torch multiplies such numbers one at a time,
    and slowest where neither matrix is transposed, as in the gradient of a linear layer's input. Some 40 ms.
    """
    if world.device.type != "cpu" or not world.is_main or cfg.dtype not in ("bf16", "fp16"):
        return
    slow, fast = product_speed(DTYPES[cfg.dtype]), product_speed(torch.float32)
    if slow * SLOWER < fast:
        get_logger().warning(
            "warning: dtype=%s on this CPU, which has no instructions for it: matrices are multiplied at %sFLOP/s, in "
            "fp32 at %sFLOP/s; set dtype=fp32",
            cfg.dtype,
            format_count(slow).replace(" B", " G"),
            format_count(fast).replace(" B", " G"),
        )


def product_speed(dtype: torch.dtype) -> float:
    """FLOP a second of the product of two matrices, neither transposed; the best of some.

    In CPU seconds of one thread: on a machine whose cores are busy, a thread is kept from them for many times as long
    as the faster product takes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(SIZE, SIZE, dtype=dtype)
        best, first = float("inf"), time.thread_time()
        for _ in range(PRODUCTS):
            began = time.thread_time()
            matrix @ matrix
            ended = time.thread_time()
            best = min(best, ended - began)
            if ended - first > ENOUGH_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return 2 * SIZE**3 / best
