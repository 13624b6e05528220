"""A plan: what a run will take, as numbers that a report, a search or another program reads. No
torch in here.
"""

import itertools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import describe_fault, read_json

# All ranks of a run: the groups of each mesh dimension, and what a plan says of their
# communication. No torch here.


@dataclass
class Volume:
    """Communication, summed up. operations: calls, each counted on every rank that takes part; a
    message is a send and a receive. bytes: of the whole tensors of these calls (the gathered one,
    the one before it is scattered, the reduced one, the message). wire_bytes: that ranks send for
    them by a ring; a receive sends none.
    """

    operations: float = 0
    bytes: float = 0
    wire_bytes: float = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.operations + other.operations,
            self.bytes + other.bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def times(self, factor: int) -> "Volume":
        """So many of it."""
        return Volume(self.operations * factor, self.bytes * factor, self.wire_bytes * factor)

    def part(self, count: int) -> "Volume":
        """One of `count` equal parts of it; whole numbers stay whole where they can."""
        sizes = (self.operations, self.bytes, self.wire_bytes)
        return Volume(*(size // count if size % count == 0 else size / count for size in sizes))


@dataclass
class DimensionPlan:
    """A dimension of the mesh with more than one rank, or `world`: several of them as one. dim: its
    name. along: the dimensions along which the ranks of a group differ. groups: the ranks of every
    group, in the order of their first ones; together they are all ranks. rank_step: of a steady
    step, one rank of each place in the pipeline, first to last. rank_micro_batch: the same of one
    micro-batch, forward and backward. cluster_step, cluster_micro_batch: the same of all ranks;
    None if not every place was planned. layer: of one micro-batch forward and backward through one
    transformer layer on one rank, as most layers have it; None if layers communicate nothing along
    it.
    """

    dim: str
    along: list[str]
    groups: list[list[int]]
    rank_step: list[Volume] = field(default_factory=list)
    rank_micro_batch: list[Volume] = field(default_factory=list)
    cluster_step: Volume | None = None
    cluster_micro_batch: Volume | None = None
    layer: Volume | None = None


def list_rank_groups(mesh: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """The ranks of each group: those that differ in the dimensions `along` alone. mesh: sizes,
    outermost first; a rank is its place in the order of all coordinates.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in mesh.values()))):
        others = tuple(at for name, at in zip(mesh, place, strict=True) if name not in along)
        found.setdefault(others, []).append(rank)
    return list(found.values())


def list_stage_ranks(mesh: Mapping[str, int], place: int) -> list[int]:
    """The ranks at one place of their pipelines."""
    inner = math.prod(mesh.values()) // mesh.get("pipeline", 1)
    return list(range(place * inner, (place + 1) * inner))


# Raised when a key changes its meaning or goes away; a new key does not raise it.
SCHEMA_VERSION = 5

FITS, RISKY, DOES_NOT_FIT = "fits", "risky", "does not fit"


@dataclass
class PhasePeak:
    """The most memory that one phase holds at a time, bytes.

    phase: `setup`, `load`, `first step`, `step`, `validation` or `save`. active: in blocks that the
    caching allocator handed out, each a multiple of 512 bytes, and in freed ones that a stream
    still uses (torch's `active_bytes.all.peak`). allocated: in blocks handed out
    (`allocated_bytes.all.peak`). reserved: taken from the device by its default configuration
    (`reserved_bytes.all.peak`); reserved_expandable: with `expandable_segments:True`. host: in
    tensors of host memory. part, module: what was running when the most was requested. requested:
    in tensors that are live, as they were asked for (`requested_bytes.all.peak`).
    """

    phase: str
    active: int
    allocated: int
    reserved: int
    reserved_expandable: int
    host: int
    part: str = ""
    module: str = ""
    requested: int = 0


@dataclass
class Alive:
    """Storages of one kind and place that are live when the most bytes are requested. kind: of
    memory, such as `parameters`. module: dotted path of the module that was running, "" outside.
    label: the parameter's name where one is known. bytes: of all of them, as they were asked for.
    count: how many.
    """

    kind: str
    module: str
    label: str
    bytes: int
    count: int


@dataclass
class OutsideTorch:
    """Device memory that no allocator of torch hands out, bytes. context: the driver's, with the
    loaded kernels. nccl: buffers of all communicators. reserve: kept free for kernels that are
    loaded late, a display, other programs.
    """

    context: int
    nccl: int
    reserve: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.context + self.nccl + self.reserve


@dataclass
class RankPlan:
    """One rank. rank: its number. coordinates: mesh dimension to place in it. peaks: by phase.
    alive: at the largest peak of active bytes, largest first. events: allocations and frees that
    were replayed. most: kind of memory to the most bytes that it takes at a time in a steady step,
    as they were asked for.
    """

    rank: int
    coordinates: dict[str, int]
    peaks: list[PhasePeak]
    alive: list[Alive]
    events: int = 0
    most: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> PhasePeak:
        """The phase in which the most is active."""
        return max(self.peaks, key=lambda peak: peak.active)

    @property
    def reserved(self) -> int:
        """The most that is reserved in any phase, default allocator."""
        return max(peak.reserved for peak in self.peaks)

    @property
    def reserved_expandable(self) -> int:
        """The same with expandable segments."""
        return max(peak.reserved_expandable for peak in self.peaks)

    @property
    def host(self) -> int:
        """The most host memory of any phase."""
        return max(peak.host for peak in self.peaks)


@dataclass
class LayerRow:
    """One module of the layer table. module: dotted path. type: its class. parameters: elements of
    the full model. trained: those of them that are trained. bytes: of all of its parameters,
    without parallelism; local_bytes: of this rank's share. kept: activation bytes this rank keeps
    of it for backward at the peak of the steady step's forward, with what is inside; a tensor is of
    the module whose output it is, or else of the one whose weight alone reads it. weights: its own
    parameters' names and shapes, as this rank computes with them: gathered where FSDP shards them,
    its shard of them in tensor parallel.
    """

    module: str
    type: str
    parameters: int
    trained: int
    bytes: int
    local_bytes: int
    kept: int = 0
    weights: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class CommunicationRow:
    """Collectives of a steady step that are alike. operation: such as `all_gather`. dim: mesh
    dimension of the group. ranks: its members. module: dotted path of what was running. dtype: such
    as `bf16`. bytes: of one (the whole tensor); wire_bytes: that one rank sends for one. where:
    part of the step. count: in a step. shapes: of this rank's tensors. seconds: of one, alone.
    """

    operation: str
    dim: str
    ranks: list[int]
    where: str
    module: str
    shapes: list[list[int]]
    dtype: str
    bytes: int
    wire_bytes: int
    count: int
    seconds: float


@dataclass
class TimePlan:
    """A steady step, seconds, of the heaviest rank, or of the rank of a pipeline that computes the
    longest. compute: kernels; communication: collectives, alone; exposed: the part of it that no
    kernel hides; step: all of it, with waiting for other ranks of a pipeline; launch: what the host
    needs to issue it. tokens_per_step, tokens_per_second: of all ranks. mfu: share of the devices'
    dense rate. steps: of the run, None where they are not known. total: of the run, None likewise.
    calibrated: the rates are measured ones. error: how far off the times may be, in words. copies:
    between host and device, alone; copies_exposed: the part of it that no kernel hides. on_host:
    what the host computes itself, its optimizer first of all. matmuls, attention, memory_bound: of
    kernels, each alone, by what they do. idle: while nothing runs: the host launches, or streams or
    other ranks are waited for. operators: that the host issues. same_experts: the step of a mixture
    of experts if all tokens of a micro-batch are computed by the same ones; None without a mixture.
    """

    compute: float
    communication: float
    exposed: float
    launch: float
    step: float
    tokens_per_step: int
    tokens_per_second: float
    mfu: float
    steps: int | None
    total: float | None
    calibrated: bool
    error: str
    copies: float = 0.0
    copies_exposed: float = 0.0
    on_host: float = 0.0
    matmuls: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    idle: float = 0.0
    operators: int = 0
    same_experts: float | None = None


@dataclass
class ActionSpan:
    """What a rank of a pipeline computes. place: of the rank in its pipeline. stage: whose turn it
    is. kind: `F` forward, `B` backward, or its halves: `I` gradient of the input, `W` gradients of
    the weights. micro_batch: of the step. start, end: seconds since the first one began.
    """

    place: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass
class StagePlan:
    """The stages of one place in a pipeline; its memory is in the rank plan of `rank`. place: in
    the pipeline. rank: that was planned for it. stages: their numbers. layers: first and last layer
    of each. parameters, trained: elements of them, without other parallelism. in_flight: the most
    micro-batches between forward and backward at a time, each stage counted; deferred: the most
    with deferred weight gradients. compute: seconds of a step that it computes. idle: share of the
    pipeline's time that it does not. sends: tensors of a step; sent: their bytes. ranks: all that
    have these stages.
    """

    place: int
    rank: int
    stages: list[int]
    layers: list[list[int]]
    parameters: int
    trained: int
    in_flight: int
    deferred: int
    compute: float
    idle: float
    sends: int
    sent: int
    ranks: list[int] = field(default_factory=list)


@dataclass
class PipelinePlan:
    """A step of a pipeline. schedule: the order of its micro-batches. stages_per_rank: as it says.
    micro_batches: of a step. micro_batch_size: sequences of each. places: first to last. seconds:
    from the first forward to the last backward; bubble: share of all ranks' time in it in which
    they do not compute; spans: what they do; None, None and empty where places or times were left
    out. ideal: the bubble of equal stages whose tensors arrive at once.
    """

    schedule: str
    stages_per_rank: int
    micro_batches: int
    micro_batch_size: int
    places: list[StagePlan]
    seconds: float | None = None
    bubble: float | None = None
    ideal: float | None = None
    spans: list[ActionSpan] = field(default_factory=list)


@dataclass
class Advice:
    """One lever pulled. override: to type. bytes: change of the peak on the device (negative: room
    gained); seconds: change of the step. fits: whether the run then fits. note: what else it means.
    """

    override: str
    bytes: int
    seconds: float | None
    fits: bool
    note: str = ""


@dataclass
class DeviceFacts:
    """The device planned for. name: such as `rtx4090`. memory: total bytes. usable: what the
    allocator may take, total without `outside`. architecture: such as `sm89`. flops: dense rate of
    the run's dtype, per second. bandwidth: of its memory, bytes per second. link: between ranks,
    such as `pcie_p2p`. link_bandwidth: bytes per second of large messages.
    """

    name: str
    memory: int
    usable: int
    architecture: str
    flops: float
    bandwidth: float
    link: str
    link_bandwidth: float


@dataclass
class Plan:
    """Everything `tune plan` knows about one run; `to_json` is the stable form.

    recipe, config, overrides: as typed. model: its preset or folder. ranks: of the run. mesh:
    dimension to its size. device: planned for. sequence: {"tokens": sequence length planned,
    "source": where it is from, "histogram": ...}. verdict: `fits`, `risky` or `does not fit`.
    margin: usable memory left at the heaviest rank, bytes; negative: short of. rank_plans: of the
    ranks traced. outside: memory that torch does not hand out. layers: of the model. communication:
    of a steady step, the heaviest rank. time: None where it was not planned. pipeline: None without
    one. advice: levers, each tried alone. assumptions, not_modeled: one sentence each. versions:
    program to version. estimate: why the figures are not those of all micro-batches and steps;
    empty where they are. notes: those of the assumptions that concern this machine and the start of
    a run. next_lever: what to change next, in words. ranks_per_node: ranks of one machine,
    neighbors in their numbers; 0: not known. dimensions: of the mesh, those with more than one
    rank, and what all ranks communicate along them. alone: the full model on one device, without
    parallelism, with the same micro-batches; None where it was not planned (without `--full`) or is
    this very run. smallest_cards: known cards of the least memory on which as many ranks fit with
    room to spare, by this plan's peak; empty: on none. tried_ranks: numbers of ranks that were
    planned to find the fewest that fit. fewest_ranks: of this device; None: not looked for (without
    `--advice`), or none of those. receipt: of the runs on this machine that were planned and
    measured, the one that is most like this, in a line; empty: there is none of this device and
    recipe. seconds: from the import of the planner to the plan; in no file, so that a plan is the
    same bytes every time.
    """

    recipe: str
    config: str
    overrides: list[str]
    model: str
    ranks: int
    mesh: dict[str, int]
    device: DeviceFacts
    sequence: dict[str, Any]
    verdict: str
    margin: int
    rank_plans: list[RankPlan]
    outside: OutsideTorch
    layers: list[LayerRow]
    communication: list[CommunicationRow]
    time: TimePlan | None
    pipeline: PipelinePlan | None = None
    advice: list[Advice] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    not_modeled: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    estimate: str = ""
    notes: list[str] = field(default_factory=list)
    next_lever: str = ""
    ranks_per_node: int = 0
    dimensions: list[DimensionPlan] = field(default_factory=list)
    alone: RankPlan | None = None
    smallest_cards: list[str] = field(default_factory=list)
    tried_ranks: list[int] = field(default_factory=list)
    fewest_ranks: int | None = None
    receipt: str = ""
    seconds: float = field(
        default=0.0, compare=False
    )  # not in the JSON, which is the same every time

    @property
    def heaviest(self) -> RankPlan:
        """The rank that reserves the most."""
        return max(self.rank_plans, key=lambda rank: rank.reserved)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; bytes, seconds, tokens."""
        plain = {"schema": SCHEMA_VERSION, **asdict(self)}
        del plain["seconds"]
        return plain

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "Plan":
        """The plan that `to_json` wrote. Keys that this version does not know are passed over.

        place: the file, for errors. ConfigError if the schema is another one, a key is missing or a
        value of another type.
        """
        if not isinstance(data, Mapping) or "schema" not in data:
            raise ConfigError(
                f"{place}: found no `schema`; expected a plan, written by `tune plan --json`"
            )
        if data["schema"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{place}: found schema {show(str(data['schema']))}, expected {SCHEMA_VERSION};"
                " plan the run again"
            )
        plan = read_typed(cls, data, place)
        if not plan.rank_plans or not all(rank.peaks for rank in plan.rank_plans):
            raise ConfigError(
                f"{place}: found a plan without peaks; expected at least one rank and phase"
            )
        return plan


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file; ConfigError if there is none."""
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({describe_fault(error)}); expected a file of `tune plan"
            " --json`"
        ) from error
    return Plan.from_json(data, str(path))


# JSON as the dataclasses that it was written from: every value of the type that its field is
# declared with.

_LARGEST = 2**63  # no size that is planned or measured is larger, nor is NaN less


def read_typed(wanted: Any, value: Any, place: str) -> Any:
    """A JSON value as the type that a field is declared with. Keys that a dataclass does not have
    are passed over.

    place: of the value, for errors. ConfigError for a value of another type, and a key without a
    default that is missing.
    """
    origin, arguments = get_origin(wanted), get_args(wanted)
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise ConfigError(f"{place}: found {show(str(value))}, expected a number below 2^63")
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        kind = next(part for part in arguments if part is not type(None))
        return None if value is None else read_typed(kind, value, place)
    if is_dataclass(wanted) and isinstance(value, Mapping):
        return _read_fields(wanted, value, place)
    if origin is list and isinstance(value, list):
        return [
            read_typed(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, Mapping):
        return {
            str(name): read_typed(arguments[1], item, f"{place}.{name}")
            for name, item in value.items()
        }
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    name = getattr(origin or wanted, "__name__", str(wanted))
    raise ConfigError(
        f"{place}: found {quote(str(value))}, expected"
        f" {'an object' if is_dataclass(wanted) else name}"
    )


def _read_fields(wanted: Any, value: Mapping[str, Any], place: str) -> Any:
    declared, found = get_type_hints(wanted), {}
    for entry in fields(wanted):
        if entry.name in value:
            found[entry.name] = read_typed(
                declared[entry.name], value[entry.name], f"{place}: {entry.name}"
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(
                f"{place}: found no `{entry.name}`; expected all keys of {wanted.__name__}"
            )
    return wanted(**found)
