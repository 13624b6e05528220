"""A trace: what a simulated run did, as plain numbers.

It says which memory was taken and given back, by which operator, and why. `tracer.py` records it;
the allocator, the time line and the views read it. Bytes are those asked for, before an allocator
rounds them; times do not exist yet: a trace is an order of events, as the host issues them. When it
is complete, `classify_activations` and `give_to_children` say what of it activations are, and which
module keeps them. No torch in here.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Kinds of memory, in the order in which a report shows them.
STORAGE_KINDS = (
    "parameters",  # this rank's shards, frozen ones too, and a model's buffers
    "gradients",  # this rank's shards of them, or whole ones where nothing is sharded
    "optimizer",  # states of the optimizer
    "gathered",  # whole parameters of an FSDP unit while it runs
    # What collectives read and write: gather buffers, gradients before they are reduced
    "communication",
    "activations",  # kept by forward for backward
    "logits",  # tensors of the output projection and the loss
    "batch",  # tokens, labels, positions, masks
    "workspace",  # scratch of kernels that no tensor shows: matmul workspaces, attention backward
    "temporary",  # everything else: intermediate results that are live for some operators only
)

# Parts of a step.
PARTS = ("setup", "forward", "backward", "recompute", "optimizer", "other")

# Kinds of events: (kind, number). ALLOC, FREE: of a storage. OP: an operator was issued. RECORD,
# WAIT: an event of the device was recorded on, waited for by a stream (numbers of `Trace.syncs`).
# PHASE: a phase began. ACTION: what a rank of a pipeline does next began, or all of it ended
# (numbers of `Trace.actions`). USE: `record_stream` named a stream for a storage (numbers of
# `Trace.uses`).
ALLOC, FREE, OP, RECORD, WAIT, PHASE, ACTION, USE = range(8)
# The list of a `Trace` that an event's number is of; FREE has that of its allocation.
_LISTS = {
    ALLOC: "storages",
    OP: "ops",
    RECORD: "syncs",
    WAIT: "syncs",
    PHASE: "phases",
    ACTION: "actions",
    USE: "uses",
}
HOST = -1  # in place of a stream
WORK_WAIT = "c10d::Work.wait"  # name of an `Op` that does nothing but wait for a collective


@dataclass(slots=True)
class Storage:
    """One allocation."""

    # As asked for.
    bytes: int
    # On the accelerator, else on the host.
    device: bool = True
    # That it was made on; 0 computes.
    stream: int = 0
    # Of STORAGE_KINDS.
    kind: str = "temporary"
    # Dotted path of the module that was running; empty: outside of modules.
    module: str = ""
    # The parameter's name where one is known.
    label: str = ""
    # The operator that made it.
    op: str = ""
    # Of PARTS.
    part: str = "other"
    # Index into `Trace.phases`.
    phase: int = 0
    # Host memory that a copy need not wait for.
    pinned: bool = False


@dataclass(slots=True)
class Collective:
    """One communication of a group of ranks."""

    # `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send` or `recv`.
    operation: str
    # Mesh dimension of the group, such as `data_shard`; `world`: all ranks.
    dim: str
    # Members of the group; of `send` and `recv` the two that exchange.
    ranks: tuple[int, ...]
    # Of the whole tensor: the gathered one, the one before it is scattered, the reduced one, the
    # message.
    bytes: int
    # Of the tensors of this rank.
    shapes: tuple[tuple[int, ...], ...] = ()
    # Such as `bf16`.
    dtype: str = ""
    # The stream that issued it waits for it at once.
    waits: bool = True


@dataclass(slots=True)
class Op:
    """One operator that does work; views do none."""

    name: str
    # That it was issued on.
    stream: int = 0
    # Of PARTS.
    part: str = "other"
    # Dotted path of what was running.
    module: str = ""
    # Index into `Trace.phases`.
    phase: int = 0
    # Of matmuls and attention; multiply and add are two.
    flops: int = 0
    # Read and written.
    bytes: int = 0
    # Of the result, for the rate that the device computes it with.
    dtype: str = ""
    collective: Collective | None = None
    # So many alike were issued one after another; this one stands for all of them, with flops and
    # bytes of one.
    repeats: int = 1
    # `to_host` or `to_device` for a copy between the two, whose bytes are counted on both sides.
    transfer: str = ""
    # Of a matmul (matrices, m, k, n), of a grouped one which of m and k is the rows of an expert (1
    # or 2) besides; of attention (rows times heads, queries, keys, keys seen by a query, width).
    shape: tuple[int, ...] = ()
    # It is the host that computes it.
    on_host: bool = False
    # In forward and recomputation, the storages of its arguments.
    reads: tuple[int, ...] = ()
    # In forward and recomputation, the storages of its results.
    makes: tuple[int, ...] = ()


@dataclass(slots=True)
class Sync:
    """An event that a stream records or waits for."""

    # Number of the event.
    event: int
    # That records or waits; HOST: the host waits.
    stream: int


@dataclass(slots=True)
class ActionMark:
    """The next action of a rank of a pipeline."""

    # That it does it for.
    stage: int = -1
    # F, B, I, W, or SF, RF, SB, RB: as the pipeline's schedule has it; empty: the end of all of it.
    kind: str = ""
    # Number in the step.
    micro_batch: int = -1
    # This one stands for as many, of later micro-batches; the operators in it say so too.
    repeats: int = 1


@dataclass
class Trace:
    """Everything one rank did, phase by phase."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    actions: list[ActionMark] = field(default_factory=list)
    # (storage, stream that uses it too).
    uses: list[tuple[int, int]] = field(default_factory=list)
    # (kind, number), in the order in which the host issued them.
    events: list[tuple[int, int]] = field(default_factory=list)

    def add(self, kind: int, entry: Any) -> int:
        """Add an event, and what it is about to the list of such; return its number there."""
        entries: list[Any] = getattr(self, _LISTS[kind])
        entries.append(entry)
        number = len(entries) - 1
        self.events.append((kind, number))
        return number

    def iterate_events(self, phase: str) -> Iterator[tuple[int, int]]:
        """Yield the events of one phase, in order; ValueError if it was not traced."""
        phase_number = self.phases.index(phase)
        current = -1
        for kind, number in self.events:
            if kind == PHASE:
                current = number
            elif current == phase_number:
                yield kind, number

    def iterate_ops(self, phase: str) -> Iterator[Op]:
        """Yield the operators of one phase, in order; ValueError if it was not traced."""
        return (self.ops[number] for kind, number in self.iterate_events(phase) if kind == OP)

    def walk(
        self, device: bool = True
    ) -> Iterator[tuple[int, int, int, str, int, dict[int, Storage]]]:
        """Yield of each event (index, kind, number, phase, bytes, storages).

        bytes, storages: what is alive after it on the accelerator, or on the host. Storages are by
        number, in a dict that goes on changing.
        """
        phase = ""
        live_bytes = 0
        alive: dict[int, Storage] = {}
        for index, (kind, number) in enumerate(self.events):
            if kind == PHASE:
                phase = self.phases[number]
            elif kind == ALLOC and self.storages[number].device == device:
                alive[number] = self.storages[number]
                live_bytes += alive[number].bytes
            elif kind == FREE and number in alive:
                live_bytes -= alive.pop(number).bytes
            yield index, kind, number, phase, live_bytes, alive

    def iterate_action_ops(self, phase: str) -> Iterator[tuple[ActionMark, int, Op]]:
        """Yield (what a rank of a pipeline does meanwhile, number, operator) of one phase."""
        action = ActionMark()
        for kind, number in self.iterate_events(phase):
            if kind == ACTION:
                action = self.actions[number]
            elif kind == OP:
                yield action, number, self.ops[number]

    def find_peaks(self, device: bool = True) -> dict[str, tuple[int, int]]:
        """Return by phase (the most bytes live at a time, index of the event that led there).

        Bytes are on the accelerator or on the host, before any rounding. The index is -1 if the
        event was before the phase.
        """
        peaks: dict[str, tuple[int, int]] = {}
        for index, kind, _, phase, live_bytes, _ in self.walk(device):
            if kind == PHASE:
                peaks[phase] = (live_bytes, -1)
            elif phase and live_bytes > peaks[phase][0]:
                peaks[phase] = (live_bytes, index)
        return peaks

    def find_active_peaks(self, device: bool = True) -> dict[str, int]:
        """Return by phase the most bytes live at a time."""
        return {phase: most for phase, (most, _) in self.find_peaks(device).items()}

    def list_alive_at_peak(self, phase: str) -> list[int]:
        """Return the numbers of the storages that are live when the most bytes of a phase are.

        KeyError if the phase is not there.
        """
        peak = self.find_peaks()[phase][1]
        if peak < 0:  # where the phase begins
            peak = self.events.index((PHASE, self.phases.index(phase)))
        return next(list(alive) for index, *_, alive in self.walk() if index == peak)


# The modules that activations belong to.
#
# A tensor belongs to the module that was running when it was made. A fused function, or a parent
# that shards its children's matrices, calls no child: all that is kept would be the parent's. So
# `give_to_children` gives it to the child whose output it is, or else to the one whose input it is.
# It stays inside the module that made it, so that the sums of parents do not change.


def classify_activations(trace: Trace) -> None:
    """Mark as activations what forward or recomputation made and backward finds when it begins."""
    waiting: dict[int, None] = {}
    for kind, number in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]
            if storage.kind == "temporary" and storage.part in ("forward", "recompute"):
                waiting[number] = None
        elif kind == FREE:
            waiting.pop(number, None)
        elif kind == OP and trace.ops[number].part == "backward":
            for activation in waiting:
                trace.storages[activation].kind = "activations"
            waiting.clear()
        elif kind == PHASE:
            waiting.clear()


def give_to_children(trace: Trace) -> None:
    """Change `module` of activations to the child module that they belong to.

    A child's output is made from its weight, or from what is that child's alone, such as queries
    before they are rotated. Its input is read by products with its weights alone, its adapter's
    among them. A tensor that several children read, such as gathered tokens, stays the parent's.
    """
    owners = {_find_owner(storage) for storage in trace.storages} - {""}
    makers: dict[int, str] = {}  # number of a storage -> the child whose output it is
    readers: dict[int, set[str]] = defaultdict(set)  # -> modules whose weights it is multiplied by
    for kind, number in trace.events:
        op = trace.ops[number] if kind == OP else None
        if op is None or not op.makes:
            continue
        weights = {_find_owner(trace.storages[read]) for read in op.reads} - {""}
        if op.flops and weights:
            for read in op.reads:
                readers[read] |= weights
        child = _find_child(op, trace.storages, weights=weights, makers=makers, owners=owners)
        if child:
            makers |= dict.fromkeys(op.makes, child)
    for number, storage in enumerate(trace.storages):
        if storage.kind != "activations" or storage.part not in ("forward", "recompute"):
            continue
        read_by = {_find_child_above(storage.module, reader) for reader in readers[number]}
        child = makers.get(number) or (read_by.pop() if len(read_by) == 1 else "")
        if child in owners and _find_child_above(storage.module, child):
            storage.module = child


def _find_owner(storage: Storage) -> str:
    """Return the module of a parameter, "" for other memory."""
    # A label that ends in `*` is that of memory which several parameters share.
    has_owner = storage.kind in ("parameters", "gathered") and not storage.label.endswith("*")
    return storage.label.rpartition(".")[0] if has_owner else ""


def _find_child(
    op: Op,
    storages: list[Storage],
    *,
    weights: set[str],
    makers: dict[int, str],
    owners: set[str],
) -> str:
    """Return the only child of the running module that an operator's arguments come from, or "".

    weights: modules of the weights among its arguments. makers: as in `give_to_children`. owners:
    modules that have parameters; a child is one of them.
    """
    children = {child for weight in weights if (child := _find_child_above(op.module, weight))}
    largest_other = 0
    for read in op.reads:
        storage = storages[read]
        if _find_owner(storage):
            continue
        if child := _find_child_above(op.module, makers.get(read) or storage.module):
            children.add(child)
        # What modules around the running one made for all layers, such as rotations, does not
        # count.
        elif not _find_child_above(storage.module, op.module) and storage.module:
            largest_other = max(largest_other, storage.bytes)
    only_child = children.pop() if len(children) == 1 else ""
    if only_child not in owners or not only_child:
        return ""
    # Without a weight of the child, its tensors have to be more than what else is read: a sum with
    # the residual stream is not the norm's.
    smallest_result = min(storages[result].bytes for result in op.makes)
    return only_child if weights or largest_other < smallest_result else ""


def _find_child_above(module: str, inside: str) -> str:
    """Return the child of `module` that `inside` is or lies in; "" if it does not lie in it."""
    if not module or not inside.startswith(f"{module}."):
        return ""
    return f"{module}.{inside[len(module) + 1 :].partition('.')[0]}"
