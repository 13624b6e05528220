"""What a simulated run did, as plain numbers: which memory was taken and given back when, by which
operator, and why.

No torch in here. Bytes are those asked for, before an allocator rounds them; times do not exist
yet: a trace is an order of events, as the host issues them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

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
HOST = -1  # in place of a stream
WORK_WAIT = "c10d::Work.wait"  # name of an `Op` that does nothing but wait for a collective


@dataclass(slots=True)
class Storage:
    """One allocation.

    bytes: asked for. device: on the accelerator, else on the host. stream: that it was made on; 0
    computes. kind: of KINDS. module: dotted path of the module that was running, "" outside. label:
    the parameter's name where one is known. op: the operator that made it. part: of PARTS. phase:
    index into `Trace.phases`. pinned: host memory that a copy need not wait for.
    """

    bytes: int
    device: bool = True
    stream: int = 0
    kind: str = "temporary"
    module: str = ""
    label: str = ""
    op: str = ""
    part: str = "other"
    phase: int = 0
    pinned: bool = False


@dataclass(slots=True)
class Collective:
    """One communication of a group of ranks.

    operation: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`,
    `recv`. dim: the mesh dimension of the group, such as `data_shard`; `world` for all ranks.
    ranks: the group's members; of `send` and `recv` the two that exchange. bytes: of the whole
    tensor: the gathered one, the one before it is scattered, the reduced one, the message. shapes:
    of the tensors of this rank. dtype: such as `bf16`. waits: the stream that issued it waits for
    it at once.
    """

    operation: str
    dim: str
    ranks: tuple[int, ...]
    bytes: int
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    waits: bool = True


@dataclass(slots=True)
class Op:
    """One operator that does work (views do none).

    repeats: so many alike were issued one after another; this one stands for all of them, with
    flops and bytes of one. flops: of matmuls and attention, multiply and add are two. bytes: read
    and written. stream: issued on. dtype: of the result, for the rate that the device computes it
    with. transfer: `to_host` or `to_device` for a copy between the two, whose bytes are counted on
    both sides. shape: of a matmul (matrices, m, k, n), of a grouped one which of m and k is the
    rows of an expert (1 or 2) besides, of attention (rows times heads, queries, keys, keys seen by
    a query, width). on_host: it is the host that computes it. reads, makes: in forward and
    recomputation, the storages of its arguments and results.
    """

    name: str
    stream: int = 0
    part: str = "other"
    module: str = ""
    phase: int = 0
    flops: int = 0
    bytes: int = 0
    dtype: str = ""
    collective: Collective | None = None
    repeats: int = 1
    transfer: str = ""
    shape: tuple[int, ...] = ()
    on_host: bool = False
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()


@dataclass(slots=True)
class Sync:
    """stream: that recorded, or waits for, the event `event`; HOST: the host waits."""

    event: int
    stream: int


@dataclass(slots=True)
class ActionMark:
    """What a rank of a pipeline does next. kind: F, B, I, W, or SF, RF, SB, RB: as the pipeline's
    schedule has it; "": the end of all of it. repeats: this one stands for as many, of later
    micro-batches; the operators in it say so too.
    """

    stage: int = -1
    kind: str = ""
    micro_batch: int = -1
    repeats: int = 1


@dataclass
class Trace:
    """Everything one rank did, phase by phase."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    actions: list[ActionMark] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)  # (storage, stream that uses it too)
    events: list[tuple[int, int]] = field(default_factory=list)

    def iterate_events(self, phase: str) -> Iterator[tuple[int, int]]:
        """The events of one phase, in order; ValueError if it was not traced."""
        wanted, current = self.phases.index(phase), -1
        for kind, number in self.events:
            if kind == PHASE:
                current = number
            elif current == wanted:
                yield kind, number

    def iterate_ops(self, phase: str) -> Iterator[Op]:
        """Yield the operators of one phase, in order; ValueError if it was not traced."""
        return (self.ops[number] for kind, number in self.iterate_events(phase) if kind == OP)

    def walk(
        self, device: bool = True
    ) -> Iterator[tuple[int, int, int, str, int, dict[int, Storage]]]:
        """Yield of each event its place, kind and number, the phase that it is in, and the memory
        on the accelerator or on the host after it: bytes, and the storages by number, in a dict
        that goes on changing.
        """
        phase = ""
        held = 0
        alive: dict[int, Storage] = {}
        for place, (kind, number) in enumerate(self.events):
            if kind == PHASE:
                phase = self.phases[number]
            elif kind == ALLOC and self.storages[number].device == device:
                alive[number] = self.storages[number]
                held += alive[number].bytes
            elif kind == FREE and number in alive:
                held -= alive.pop(number).bytes
            yield place, kind, number, phase, held, alive

    def iterate_action_ops(self, phase: str) -> Iterator[tuple[ActionMark, int, Op]]:
        """Yield the operators of one phase with their numbers, and what a rank of a pipeline does
        meanwhile.
        """
        action = ActionMark()
        for kind, number in self.iterate_events(phase):
            if kind == ACTION:
                action = self.actions[number]
            elif kind == OP:
                yield action, number, self.ops[number]

    def peaks(self, device: bool = True) -> dict[str, tuple[int, int]]:
        """By phase the most bytes live at a time, on the accelerator or on the host, before any
        rounding; and the number of the event that led there, -1 if it was before the phase.
        """
        peaks: dict[str, tuple[int, int]] = {}
        for place, kind, _, phase, held, _ in self.walk(device):
            if kind == PHASE:
                peaks[phase] = (held, -1)
            elif phase and held > peaks[phase][0]:
                peaks[phase] = (held, place)
        return peaks

    def find_active_peaks(self, device: bool = True) -> dict[str, int]:
        """By phase the most bytes live at a time."""
        return {phase: most for phase, (most, _) in self.peaks(device).items()}

    def list_alive_at_peak(self, phase: str, device: bool = True) -> list[int]:
        """Numbers of the storages that are live when the most bytes are, in one phase; KeyError if
        it is not there.
        """
        at = self.peaks(device)[phase][1]
        if at < 0:  # where the phase begins
            at = self.events.index((PHASE, self.phases.index(phase)))
        return next(list(alive) for place, *_, alive in self.walk(device) if place == at)
