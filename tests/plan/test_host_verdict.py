"""A plan that takes more host memory than the config allows does not fit, however much the device
has left.
"""

from typing import Any

import pytest

from tests.plan.apart import build_settings, call_in_fork


def planned(allowed: float) -> tuple[str, int, str]:
    """Verdict, bytes that are left on the device, and the reason."""
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.views.verdict_text import explain_verdict

    overrides = (
        "device=auto",
        "memory.optimizer_offload=true",
        f"memory.host_memory_limit_gib={allowed}",
    )
    kind, cfg, wanted = build_settings("demo/full", 2, *overrides)
    plan: Any = make_plan(kind, cfg, wanted)[0]
    return plan.verdict, plan.margin, explain_verdict(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "verdict"), [(0.001, "does not fit"), (1.0, "fits")])
def test_what_the_config_allows_decides(allowed: float, verdict: str):
    """Two states of half a million weights in fp32 are 4 MB on both ranks together."""
    found, margin, reason = call_in_fork(planned, allowed)
    assert found == verdict and margin > 0
    if verdict == "fits":
        assert not reason
    else:
        assert reason.startswith(
            "memory.host_memory_limit_gib allows 0.001 GiB for 2 ranks of a machine, which take "
        )
        assert reason.endswith(": too little, a run is refused")


def peaks(*overrides: str) -> tuple[int, int]:
    """Most bytes on a CPU that is planned for, and beside it."""
    from recipe_lib.plan.build_plan import make_plan

    kind, cfg, wanted = build_settings("demo/full", 1, "device=auto", *overrides, device="cpu")
    plan: Any = make_plan(kind, cfg, wanted)[0]
    return plan.heaviest.peak.active, plan.heaviest.host


@pytest.mark.slow
def test_a_cpu_has_no_host_beside_it():
    assert call_in_fork(peaks, "memory.optimizer_offload=true") == call_in_fork(peaks)


def offloaded() -> tuple[int, int, list[int]]:
    """Most bytes on the host of a plan with everything there, as a run judges it, and the
    parameters' bytes.
    """
    import torch

    from recipe_lib.models import build_meta, build_spec, read_preset_config
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.training.run_description import count_offloaded_bytes

    kind, cfg, wanted = build_settings("demo/full", 1, "device=auto", "memory.cpu_offload=true")
    plan: Any = make_plan(kind, cfg, wanted)[0]
    model = build_meta(build_spec(read_preset_config(cfg.model.preset), "demo"), torch.float32)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    return plan.heaviest.host, count_offloaded_bytes(model, cfg)["cpu_offload"], sizes


def test_gradients_that_are_sent_to_the_host_are_pinned():
    """As parameters are, in blocks of powers of two; AdamW's two states are not. A plan has a few
    numbers besides.
    """
    planned_bytes, judged, sizes = call_in_fork(offloaded)
    pinned = sum(next(2**power for power in range(64) if 2**power >= size) for size in sizes)
    assert judged == 2 * pinned + 2 * sum(sizes)
    assert 0 < planned_bytes - judged < 1024 < pinned - sum(sizes)
