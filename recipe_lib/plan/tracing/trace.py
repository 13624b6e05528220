"""Define the trace of a run: its allocations, operators and waits, as plain numbers.

`tracer.Tracer` records one. The models of the allocator and of a step's time read it, and so do the
reports. A trace has no times: events are in the order in which the host issues them. In a complete
one, `activations.py` finds what is kept for backward and by which module. No torch in here.
"""

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

# Parts of a step: `forward`, `backward`, `recompute` (a forward inside of backward, by activation
# checkpointing), `optimizer` and `other`.

# Kinds of events. An event is (kind, index into the list of the trace that `_LISTS` names).
# ALLOC, FREE: a storage was taken or released. OP: an operator was issued. RECORD: a stream
# recorded an event of the device (`torch.cuda.Event`). WAIT: a stream waited for one. PHASE: a
# phase of the run began, such as a step. ACTION: the next action of a pipeline's rank (the forward,
# backward, send or receive of a micro-batch) began, or its last one ended. USE: `record_stream`
# named a stream that uses a storage.
ALLOC, FREE, OP, RECORD, WAIT, PHASE, ACTION, USE = range(8)
# FREE is not here: it makes no new entry, and has the index of its storage.
_LISTS = {
    ALLOC: "storages",
    OP: "ops",
    RECORD: "syncs",
    WAIT: "syncs",
    PHASE: "phases",
    ACTION: "actions",
    USE: "uses",
}
HOST = -1  # in place of a stream's number: it is the host that waits
WORK_WAIT = "c10d::Work.wait"  # name of an `Op` that does nothing but wait for a collective


@dataclass(slots=True)
class Storage:
    """One allocation; memory that is resized is another one."""

    bytes: int  # as asked for, before an allocator rounds it
    device: bool = True  # True: on the accelerator; False: on the host
    stream: int = 0  # current stream when it was allocated; 0 is the one that computes
    kind: str = "temporary"  # one of STORAGE_KINDS
    module: str = ""  # dotted path of the module that was running; "": outside of modules
    label: str = ""  # name of the parameter that it belongs to; "": none is known
    op: str = ""  # name of the operator that made it
    part: str = "other"  # part of the step that made it, such as `forward`
    phase: int = 0  # index into `Trace.phases`
    pinned: bool = False  # page-locked host memory, which copies without blocking the host


@dataclass(slots=True)
class Collective:
    """One communication of a group of ranks."""

    # `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send` or `recv`.
    operation: str
    # Mesh dimension of the group, such as `data_shard`; `world`: all ranks.
    dim: str
    # Ranks of the group; of `send` and `recv` the two that exchange.
    ranks: tuple[int, ...]
    # Bytes of the whole tensor: the gathered one, the one before it is scattered, the reduced one,
    # the message.
    bytes: int
    # Shapes of this rank's tensors.
    shapes: tuple[tuple[int, ...], ...] = ()
    # Type of the tensors, such as `bf16`.
    dtype: str = ""
    # True: the stream that issued it waits for it at once; False: it is asynchronous.
    waits: bool = True


@dataclass(slots=True)
class Op:
    """One operator that does work; views do none."""

    name: str  # with its namespace, such as `aten::mm`
    stream: int = 0  # number of the stream that it was issued on
    part: str = "other"  # part of the step, such as `forward`
    module: str = ""  # dotted path of the module that was running; "": outside of modules
    phase: int = 0  # index into `Trace.phases`
    flops: int = 0  # of a matmul or attention, a multiply and an add counted as two; else 0
    bytes: int = 0  # read and written
    dtype: str = ""  # type that the device's rate is looked up for, such as `bf16`
    collective: Collective | None = None  # None: it communicates nothing
    # It stands for so many operators like it; flops and bytes are those of one.
    repeats: int = 1
    # `to_host` or `to_device` for a copy between the two, whose bytes are counted on both sides.
    transfer: str = ""
    # Of a matmul: (matrices, m, k, n). Of a grouped matmul also the index (1 or 2) of the dimension
    # that an expert's rows are. Of attention: (rows times heads, queries, keys, keys that a query
    # sees on average, head width).
    shape: tuple[int, ...] = ()
    on_host: bool = False  # True: the host computes it, not the accelerator
    # Indices of its arguments' storages; () but in forward and recomputation.
    reads: tuple[int, ...] = ()
    # Indices of its results' storages; () but in forward and recomputation.
    makes: tuple[int, ...] = ()


@dataclass(slots=True)
class Sync:
    """An event of the device (`torch.cuda.Event`) that a stream records or waits for."""

    event: int  # its number: one for each time that it is recorded
    stream: int  # number of the stream that records or waits; HOST: the host waits


@dataclass(slots=True)
class ActionMark:
    """The begin of the next action of a pipeline's rank."""

    stage: int = -1  # pipeline stage that it is done for; -1: none
    # F: forward. B: backward. I: backward of inputs only, W: of weights only. SF, RF: send, receive
    # activations. SB, RB: send, receive gradients. "": the step's last action has ended.
    kind: str = ""
    micro_batch: int = -1  # index in the step; -1: none
    # It stands for so many actions of the step; `repeats` of the operators in it counts them too.
    repeats: int = 1


@dataclass
class Trace:
    """Everything one rank did, phase by phase.

    An entry of a list is referred to by its index.
    """

    storages: list[Storage] = field(default_factory=list)  # all allocations, in order
    ops: list[Op] = field(default_factory=list)  # all operators that do work, in order
    syncs: list[Sync] = field(default_factory=list)  # records of events and waits for them
    phases: list[str] = field(default_factory=list)  # names, such as `setup` or `step`
    actions: list[ActionMark] = field(default_factory=list)  # [] without a pipeline
    # (index of a storage, another stream that uses it).
    uses: list[tuple[int, int]] = field(default_factory=list)
    # (kind, index into the list of that kind), in the order in which the host issued them.
    events: list[tuple[int, int]] = field(default_factory=list)

    def add(self, kind: int, entry: Any) -> int:
        """Add an event, and its entry (a Storage, Op, ...) to its list; return the index there.

        kind: any but FREE, whose events have no entry.
        """
        entries: list[Any] = getattr(self, _LISTS[kind])
        entries.append(entry)
        index = len(entries) - 1
        self.events.append((kind, index))
        return index

    def iterate_events(self, phase: str) -> Iterator[tuple[int, int]]:
        """Yield the events of one phase, in order; ValueError if it was not traced."""
        phase_index = self.phases.index(phase)
        current_phase = -1
        for kind, index in self.events:
            if kind == PHASE:
                current_phase = index
            elif current_phase == phase_index:
                yield kind, index

    def iterate_ops(self, phase: str) -> Iterator[Op]:
        """Yield the operators of one phase, in order; ValueError if it was not traced."""
        return (self.ops[index] for kind, index in self.iterate_events(phase) if kind == OP)

    def walk(
        self, device: bool = True
    ) -> Iterator[tuple[int, int, int, str, int, dict[int, Storage]]]:
        """Yield for each event (its index, kind, entry index, name of the phase, bytes, storages).

        bytes, storages: what is alive after it on the accelerator, or with `device=False` on the
        host. storages: index -> Storage; the same dict each time, changed in place.
        """
        phase = ""
        live_bytes = 0
        alive: dict[int, Storage] = {}
        for event_index, (kind, index) in enumerate(self.events):
            if kind == PHASE:
                phase = self.phases[index]
            elif kind == ALLOC and self.storages[index].device == device:
                alive[index] = self.storages[index]
                live_bytes += alive[index].bytes
            elif kind == FREE and index in alive:
                live_bytes -= alive.pop(index).bytes
            yield event_index, kind, index, phase, live_bytes, alive

    def iterate_action_ops(self, phase: str) -> Iterator[tuple[ActionMark, int, Op]]:
        """Yield (action of the pipeline's rank, index of the operator, operator) of one phase."""
        action = ActionMark()
        for kind, index in self.iterate_events(phase):
            if kind == ACTION:
                action = self.actions[index]
            elif kind == OP:
                yield action, index, self.ops[index]

    def find_peaks(self, device: bool = True) -> dict[str, tuple[int, int]]:
        """Return phase -> (the most bytes alive at a time, index of the event that led there).

        Bytes are those on the accelerator, or with `device=False` on the host. The index is -1 if
        the phase begins with the most.
        """
        peaks: dict[str, tuple[int, int]] = {}
        for index, kind, _, phase, live_bytes, _ in self.walk(device):
            if kind == PHASE:
                peaks[phase] = (live_bytes, -1)
            elif phase and live_bytes > peaks[phase][0]:
                peaks[phase] = (live_bytes, index)
        return peaks

    def find_active_peaks(self, device: bool = True) -> dict[str, int]:
        """Return phase -> the most bytes alive at a time, as `find_peaks`."""
        return {phase: peak_bytes for phase, (peak_bytes, _) in self.find_peaks(device).items()}

    def list_alive_at_peak(self, phase: str) -> list[int]:
        """Return the indices of the storages on the accelerator that are alive at a phase's peak.

        Raises KeyError if the phase was not traced.
        """
        peak = self.find_peaks()[phase][1]
        if peak < 0:  # where the phase begins
            peak = self.events.index((PHASE, self.phases.index(phase)))
        return next(list(alive) for index, *_, alive in self.walk() if index == peak)
