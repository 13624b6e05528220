"""Write traces by hand, or random ones that look like training, for tests of what reads traces.

A trace is what a simulated run records in order: phases, allocations, frees and operators.
"""

import random

from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Op, Storage, Trace


class Writer:
    """Writes a trace event by event."""

    def __init__(self):
        self.trace = Trace()

    def begin_phase(self, name: str) -> None:
        """Begin a phase, such as "setup" or "step"."""
        self.trace.phases.append(name)
        self.trace.events.append((PHASE, len(self.trace.phases) - 1))

    def allocate(self, num_bytes: int, **fields) -> int:
        """Allocate a storage in the current phase; return its number. fields: more of `Storage`."""
        fields.setdefault("phase", len(self.trace.phases) - 1)
        self.trace.storages.append(Storage(num_bytes, **fields))
        self.trace.events.append((ALLOC, len(self.trace.storages) - 1))
        return len(self.trace.storages) - 1

    def free(self, number: int) -> None:
        """Free the storage that `allocate` gave this number."""
        self.trace.events.append((FREE, number))

    def run_op(self, name: str) -> None:
        """Run an operator."""
        self.trace.ops.append(Op(name))
        self.trace.events.append((OP, len(self.trace.ops) - 1))


def build_training_steps(layers: int = 6, steps: int = 2, seed: int = 0) -> Trace:
    """Return a random trace of steps that look like training.

    Weights stay. In each step activations pile up and are freed in reverse, gathers run on a second
    stream, and temporaries have odd sizes. Optimizer states come with the first step.
    """
    rng = random.Random(seed)
    writer = Writer()
    writer.begin_phase("setup")
    weights = [
        writer.allocate(rng.randrange(1, 40 * 2**20), kind="parameters", label=f"w{layer}")
        for layer in range(layers)
    ]
    writer.allocate(12345, device=False)  # on the host: no allocator of a device sees it
    writer.allocate(0)
    for step in range(steps):
        writer.begin_phase("first step" if step == 0 else "step")
        activations = []
        for part in ("forward", "backward"):
            for layer in range(layers):
                module = f"layers.{layer if part == 'forward' else layers - 1 - layer}"
                location = {"module": module, "part": part}
                gathered_bytes = 4 * writer.trace.storages[weights[layer]].bytes
                gathered = writer.allocate(gathered_bytes, stream=1, kind="gathered", **location)
                temporaries = [
                    writer.allocate(rng.randrange(1, 5 * 2**20), op="mm", **location)
                    for _ in range(8)
                ]
                writer.run_op("mm")
                rng.shuffle(temporaries)
                if part == "forward":
                    num_bytes = rng.randrange(1, 30 * 2**20)
                    activations.append(
                        writer.allocate(num_bytes, kind="activations", op="mm", **location)
                    )
                else:
                    writer.free(activations.pop())
                for number in [*temporaries, gathered]:
                    writer.free(number)
        if step == 0:
            for number in weights:
                writer.allocate(
                    2 * writer.trace.storages[number].bytes,
                    kind="optimizer",
                    part="optimizer",
                    op="zeros_like",
                )
    return writer.trace
