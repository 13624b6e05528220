"""What an estimate of a run says, whichever way it was made."""

from dataclasses import dataclass

from recipe_lib.plan.tables import outermost
from recipe_lib.plan.tracing.simulate import Simulated


@dataclass(frozen=True)
class Estimate:
    """What a run takes on one rank, per device.

    active: most bytes in blocks, as `PhasePeak.active`; phase, part, module: where, with `*` for a number of an inner
    layer. reserved, reserved_expandable: active, and what the allocator held beyond it in the short simulations, where
    less or more of it can lie idle than in the whole run: up to a tenth of the peak off, either way. host: most
    bytes of host memory. seconds: of a steady step. tokens: of a step, all ranks. held: bytes that are alive between
    two steps. parameters, trained: bytes of the whole model's. `active` is off by 0.5 % at most, and mostly
    by a few bytes. first: of rank 0, where another place of a pipeline is the heaviest: active, reserved and
    reserved_expandable. estimate: as `Plan.estimate`.
    """

    active: int
    reserved: int
    reserved_expandable: int
    host: int
    seconds: float
    tokens: int
    held: int
    parameters: int
    trained: int
    phase: str
    part: str
    module: str
    first: tuple[int, int, int] | None = None
    estimate: str = ""


def parameter_bytes(found: Simulated) -> int:
    """Of all modules of a simulated rank, without other parallelism."""
    return sum(facts.bytes for facts in outermost(found.modules))


def trained_bytes(found: Simulated) -> int:
    """By the share of a module's parameters that are trained; roughly, where some of its weights are packed."""
    return sum(facts.bytes * facts.trained // max(facts.parameters, 1) for facts in outermost(found.modules))
