"""Memory of the ranks of a pipeline, which hold unlike parts of the model and of the micro-batches on their way."""

from typing import TYPE_CHECKING

from recipe_lib.memory.peaks import Peaks
from recipe_lib.units import gib

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World


def peaks_of_places(own: Peaks, world: "World") -> tuple[Peaks, dict[str, float]]:
    """The peaks of the rank that has reserved most, and by place in the pipeline what its ranks allocated at most, GiB.

    A collective of the host in a pipeline; without one the rank's own peaks, and nothing more.
    """
    if world.pipeline is None:
        return own, {}
    gathered: list[tuple[int, Peaks]] = world.gather_json([world.pipeline.rank, own])
    places: dict[str, float] = {}
    for place, peaks in gathered:
        name = f"peak_memory_allocated_gib_pipeline_{place}"
        places[name] = max(places.get(name, 0.0), gib(peaks["allocated"]))
    return max((peaks for _, peaks in gathered), key=lambda peaks: peaks["reserved"]), places
