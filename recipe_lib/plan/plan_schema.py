"""Define the dataclasses of a plan (the memory, time and communication of a run), and its JSON.

`build_plan.make_plan` makes a `Plan`; `plan/views` formats it, `plan/search` compares plans.
`Plan.to_json` makes JSON and `read_plan` reads a file; each field is a key (docs/plan_json.md).
Bytes are of one rank's device, times are seconds. A place is a rank's position in a pipeline. A
steady step is any after the first, which makes optimizer states. No torch: plans are read fast.
"""

import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import describe_fault, read_json

# Of the JSON: goes up when a key changes its meaning or goes away, not when one is added.
SCHEMA_VERSION = 5

# Verdicts on whether a run fits into its device's memory.
FITS = "fits"
RISKY = "risky"  # it fits only with expandable segments or retries, or with little to spare
DOES_NOT_FIT = "does not fit"
# Beginning of the sentence in `Plan.assumptions` on whether the host's memory is enough; views find
# the sentence by it.
HOST_ALLOWS = "memory.host_memory_limit_gib allows"


@dataclass
class Volume:
    """Sums over collectives and messages (a send and a receive each) of one or more ranks."""

    # Calls, each counted on every rank that takes part: a message counts twice. A float where
    # `divide` leaves a fraction.
    operations: float = 0
    # Bytes of the full tensor of each call: the one gathered, the one that is to be scattered, the
    # one reduced, or the message.
    bytes: float = 0
    # Bytes that the ranks send for these calls in a ring; a receive sends none.
    wire_bytes: float = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.operations + other.operations,
            self.bytes + other.bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def multiply(self, factor: int) -> "Volume":
        return Volume(self.operations * factor, self.bytes * factor, self.wire_bytes * factor)

    def divide(self, count: int) -> "Volume":
        """Return one of `count` equal parts.

        Sums that `count` divides stay integers, so that the JSON has no `.0`.
        """
        return Volume(
            *(size // count if size % count == 0 else size / count for size in astuple(self))
        )


@dataclass
class DimensionPlan:
    """Communication along a dimension of the device mesh that has more than one rank."""

    # Name of the mesh dimension; `world`: several dimensions that communicate as one group.
    dim: str
    # The mesh dimensions along which the ranks of a group differ; several for `world`.
    along: list[str]
    # The ranks of every group, ordered by first rank; together they are all ranks.
    groups: list[list[int]]
    # A steady step of one rank of each place in the pipeline, first place to last.
    rank_step: list[Volume] = field(default_factory=list)
    # Forward and backward of one micro-batch on the same ranks.
    rank_micro_batch: list[Volume] = field(default_factory=list)
    # A steady step of all ranks; None if not every place in the pipeline was planned.
    cluster_step: Volume | None = None
    # Forward and backward of one micro-batch on all ranks; None likewise.
    cluster_micro_batch: Volume | None = None
    # Forward and backward of one micro-batch through one transformer layer on one rank, as most
    # layers have it; None if layers communicate nothing along this dimension.
    layer: Volume | None = None


def list_rank_groups(mesh: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group: those that differ in the dimensions `along` alone.

    mesh: dimension -> size, outermost first. Ranks count the coordinates with the last dimension
    fastest.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*map(range, mesh.values()))):
        # All ranks of a group have these coordinates in common.
        key = tuple(
            coordinate
            for name, coordinate in zip(mesh, coordinates, strict=True)
            if name not in along
        )
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


@dataclass
class PhasePeak:
    """The peaks of memory in one phase of a run, bytes."""

    # `setup`, `load`, `first step`, `step`, `validation` or `save`.
    phase: str
    # In blocks that the caching allocator handed out, each a multiple of 512 bytes, and in freed
    # ones that a stream still uses: torch's `active_bytes.all.peak`.
    active: int
    # In blocks that are handed out: `allocated_bytes.all.peak`.
    allocated: int
    # Taken from the device by the default allocator: `reserved_bytes.all.peak`.
    reserved: int
    # The same with `expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF.
    reserved_expandable: int
    # In tensors that lie in host memory.
    host: int
    # Part of the step that was running when the most was requested, such as `backward`.
    part: str = ""
    # Dotted path of the module that was running then.
    module: str = ""
    # In live tensors, without rounding up to blocks: `requested_bytes.all.peak`.
    requested: int = 0


@dataclass
class Alive:
    """Storages of one kind, module and label that are live when the most bytes are requested."""

    # Kind of memory, such as `parameters` (one of `trace.STORAGE_KINDS`).
    kind: str
    # Dotted path of the module that allocated them; empty: outside of modules.
    module: str
    # Name of the parameter that they belong to; empty: none is known.
    label: str
    # Requested bytes of all these storages.
    bytes: int
    # Number of storages.
    count: int


@dataclass
class OutsideTorch:
    """Device memory that no allocator of torch hands out, bytes."""

    # The CUDA context of the driver, with the loaded kernels.
    context: int
    # Buffers of all NCCL communicators.
    nccl: int
    # Left free for kernels that are loaded late, a display, and other programs.
    reserve: int = 0

    @property
    def total(self) -> int:
        return self.context + self.nccl + self.reserve


@dataclass
class RankPlan:
    """The memory of one rank."""

    # Global rank.
    rank: int
    # Mesh dimension -> this rank's coordinate in it.
    coordinates: dict[str, int]
    # One for each phase that was simulated, in order.
    peaks: list[PhasePeak]
    # Live storages in the phase with the largest peak of active bytes, when the most bytes are
    # requested in it; largest first.
    alive: list[Alive]
    # Number of allocations and frees that were replayed.
    events: int = 0
    # Kind of memory -> the most requested bytes that it has at a time in a steady step.
    most: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> PhasePeak:
        """Return the phase in which the most is active."""
        return max(self.peaks, key=lambda peak: peak.active)

    @property
    def reserved(self) -> int:
        return max(peak.reserved for peak in self.peaks)

    @property
    def reserved_expandable(self) -> int:
        return max(peak.reserved_expandable for peak in self.peaks)

    @property
    def host(self) -> int:
        return max(peak.host for peak in self.peaks)


@dataclass
class LayerRow:
    """A module in the table of layers; figures include those of its submodules."""

    # Dotted path.
    module: str
    # Name of its class.
    type: str
    # Number of elements of its parameters in the full model.
    parameters: int
    # Number of those elements that are trained.
    trained: int
    # Bytes of its parameters in the full model.
    bytes: int
    # Bytes of this rank's shards of them.
    local_bytes: int
    # Activation bytes that this rank keeps for backward at the peak of a steady step's forward. A
    # tensor counts for the module whose output it is, or else for the one whose weight alone reads
    # it.
    kept: int = 0
    # Name -> shape of the parameters outside of submodules, as this rank computes with them:
    # gathered where FSDP shards them, this rank's shard in tensor parallelism.
    weights: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class CommunicationRow:
    """Collectives of a steady step that are alike."""

    # Such as `all_gather`.
    operation: str
    # Mesh dimension of the group; `world`: it is of several.
    dim: str
    # Global ranks of the group.
    ranks: list[int]
    # Part of the step, such as `forward`.
    where: str
    # Dotted path of the module that was running.
    module: str
    # Shapes of this rank's tensors.
    shapes: list[list[int]]
    # Dtype of the tensors, such as `bf16`.
    dtype: str
    # Bytes of the full tensor of one collective.
    bytes: int
    # Bytes that one rank sends for one collective.
    wire_bytes: int
    # Number of collectives in a step.
    count: int
    # Seconds of one collective while nothing else runs.
    seconds: float


@dataclass
class TimePlan:
    """A steady step in seconds, of the heaviest rank.

    In a pipeline it is that of the rank that computes the longest.
    """

    # Time during which kernels run, on one stream or several; those of collectives do not count.
    compute: float
    # Collectives, each as long as it takes while nothing else runs.
    communication: float
    # The part of communication during which no kernel computes.
    exposed: float
    # CPU time of the host for issuing all operators.
    launch: float
    # The step from begin to end, with waiting for other ranks of a pipeline.
    step: float
    # Tokens of a step on all ranks.
    tokens_per_step: int
    # Tokens per second of all ranks.
    tokens_per_second: float
    # Model FLOPs utilization: share of the device's dense rate.
    mfu: float
    # Steps of the run; None where they are not known.
    steps: int | None
    # Seconds of the run; None where its steps are not known.
    total: float | None
    # True: the rates of the device were measured; False: they are those of data sheets.
    calibrated: bool
    # A text: how far off the times may be.
    error: str
    # Copies between host and device, each as long as it takes while nothing else runs.
    copies: float = 0.0
    # The part of copies during which no kernel computes.
    copies_exposed: float = 0.0
    # Operators that the host's CPU computes, above all the optimizer of offloaded states.
    on_host: float = 0.0
    # Matmuls, each alone.
    matmuls: float = 0.0
    # Attention kernels, each alone.
    attention: float = 0.0
    # All other kernels, each alone.
    memory_bound: float = 0.0
    # Time while nothing runs on the device, which waits for the host or for other ranks.
    idle: float = 0.0
    # Number of operators that the host issues.
    operators: int = 0
    # A step of a mixture of experts if the router sends all tokens of a micro-batch to the same
    # experts; None without a mixture.
    same_experts: float | None = None


@dataclass
class ActionSpan:
    """A forward or backward of one micro-batch on a rank of a pipeline."""

    # Coordinate of the rank in the pipeline dimension.
    place: int
    # Index of the stage that runs the micro-batch.
    stage: int
    # `F` forward, `B` backward, or its halves: `I` gradient of the input, `W` gradients of the
    # weights.
    kind: str
    # Index of the micro-batch in the step.
    micro_batch: int
    # From the begin of the step's first action to that of this one.
    start: float
    # From the begin of the step's first action to the end of this one.
    end: float


@dataclass
class StagePlan:
    """The stages of one place in a pipeline; its memory is in the rank plan of `rank`."""

    # Coordinate in the pipeline dimension.
    place: int
    # The rank that was planned for this place.
    rank: int
    # Indices of its stages in the pipeline.
    stages: list[int]
    # [first layer, last layer] of each stage.
    layers: list[list[int]]
    # Number of elements of its parameters, before other parallelism shards them.
    parameters: int
    # Number of those elements that are trained.
    trained: int
    # The most micro-batches between forward and backward at a time, summed over its stages.
    in_flight: int
    # The most micro-batches at a time whose weight gradients wait to be computed after the backward
    # of their inputs (zero bubble).
    deferred: int
    # Seconds of a step in which it computes.
    compute: float
    # Share of the pipeline's time in which it does not compute.
    idle: float
    # Number of tensors that it sends in a step.
    sends: int
    # Bytes that it sends in a step.
    sent: int
    # All global ranks with these stages.
    ranks: list[int] = field(default_factory=list)


@dataclass
class PipelinePlan:
    """A step of a pipeline."""

    # Name of the schedule, such as `1f1b`.
    schedule: str
    # Number of stages on each rank.
    stages_per_rank: int
    # Number of micro-batches in a step.
    micro_batches: int
    # Number of sequences in a micro-batch.
    micro_batch_size: int
    # One for each place that was planned, first to last.
    places: list[StagePlan]
    # From the first forward to the last backward; None where places or times were left out.
    seconds: float | None = None
    # Share of `seconds` in which ranks do not compute, mean of all ranks; None likewise.
    bubble: float | None = None
    # The bubble if all stages took equally long and their tensors arrived at once.
    ideal: float | None = None
    # Forwards and backwards of all places; empty where places or times were left out.
    spans: list[ActionSpan] = field(default_factory=list)


@dataclass
class Advice:
    """A lever (a config key that trades memory for time or precision), changed alone."""

    # `key=value`, as typed after `tune run`.
    override: str
    # Change of the peak on the device; negative: room gained.
    bytes: int
    # Change of a step's time; None: not planned.
    seconds: float | None
    # True: the run fits with it.
    fits: bool
    # Other effects, as a text; empty: there are none.
    note: str = ""


@dataclass
class DeviceFacts:
    """The device planned for."""

    # Such as `rtx4090`.
    name: str
    # Total bytes of memory.
    memory: int
    # Bytes that the allocator may take: the total without `outside`.
    usable: int
    # Such as `sm89`.
    architecture: str
    # Dense operations per second in the run's dtype.
    flops: float
    # Bandwidth of its memory, bytes per second.
    bandwidth: float
    # Kind of link between ranks, such as `pcie_p2p`.
    link: str
    # Bytes per second of large messages over the link.
    link_bandwidth: float


@dataclass
class Plan:
    """Everything `tune plan` knows about one run; `to_json` is the stable form."""

    # Recipe, config and overrides (`key=value`) as they were typed.
    recipe: str
    config: str
    overrides: list[str]
    # Preset or folder of the model.
    model: str
    # Number of ranks of the run.
    ranks: int
    # Mesh dimension -> its size.
    mesh: dict[str, int]
    # The device of every rank.
    device: DeviceFacts
    # `tokens`: sequence length planned; `source`: where it is from, in words; `histogram`: number
    # and percentiles of the dataset's lengths, or None; `documents`: documents in a packed
    # sequence; `group`: sequences of one item, 2 for pairs.
    sequence: dict[str, Any]
    # FITS, RISKY or DOES_NOT_FIT.
    verdict: str
    # Usable bytes left on the heaviest rank; negative: bytes that it lacks.
    margin: int
    # One for each simulated rank.
    rank_plans: list[RankPlan]
    # Memory that torch does not hand out.
    outside: OutsideTorch
    # The model's modules.
    layers: list[LayerRow]
    # Collectives of a steady step on the heaviest rank.
    communication: list[CommunicationRow]
    # Times of a steady step; None where they were not planned.
    time: TimePlan | None
    # None without a pipeline.
    pipeline: PipelinePlan | None = None
    # Changes of the config, each tried alone.
    advice: list[Advice] = field(default_factory=list)
    # What was assumed, one sentence each.
    assumptions: list[str] = field(default_factory=list)
    # What a run may take that the plan leaves out, one sentence each.
    not_modeled: list[str] = field(default_factory=list)
    # Name of a program or library -> its version.
    versions: dict[str, str] = field(default_factory=dict)
    # Why the figures are not those of all micro-batches and steps; empty where they are.
    estimate: str = ""
    # Those of the assumptions that concern this machine and the start of a run.
    notes: list[str] = field(default_factory=list)
    # What to change to fit, or to use what is left, in words; empty: nothing is known to help.
    next_lever: str = ""
    # Number of ranks on one machine, which has consecutive ranks; 0: not known.
    ranks_per_node: int = 0
    # Mesh dimensions with more than one rank, and what the ranks communicate along them.
    dimensions: list[DimensionPlan] = field(default_factory=list)
    # The full model on one device, without parallelism, with the same micro-batches; None where it
    # was not planned (without `--full`) or is this very run.
    alone: RankPlan | None = None
    # Names of the cards with the least memory on which as many ranks fit with room to spare, by
    # this plan's peak; empty: there are none.
    smallest_cards: list[str] = field(default_factory=list)
    # Numbers of ranks that were planned to find the fewest that fit.
    tried_ranks: list[int] = field(default_factory=list)
    # The fewest ranks that fit on this device; None: not looked for (without `--advice`), or no
    # number that was tried fits.
    fewest_ranks: int | None = None
    # One line on a receipt (planned and measured peaks of an earlier run on this machine), that of
    # the run most like this one; empty: there is none of this device and recipe.
    receipt: str = ""
    # Time from the import of the planner to the finished plan. Neither in the JSON nor compared:
    # the same run gives the same plan every time.
    seconds: float = field(default=0.0, compare=False)

    @property
    def heaviest(self) -> RankPlan:
        """Return the rank that reserves the most."""
        return max(self.rank_plans, key=lambda rank: rank.reserved)

    def to_json(self) -> dict[str, Any]:
        plain = {"schema": SCHEMA_VERSION, **asdict(self)}
        del plain["seconds"]
        return plain

    @classmethod
    def from_json(cls, data: Any, location: str = "plan") -> "Plan":
        """Return the plan that `to_json` wrote; keys that this version lacks are ignored.

        location: the file, for errors. Raises ConfigError if the schema is of another version, a
        key is missing, a value has another type, or there is no rank or no phase.
        """
        if not isinstance(data, Mapping) or "schema" not in data:
            raise ConfigError(
                f"{location}: found no `schema`; expected a plan, written by `tune plan --json`"
            )
        if data["schema"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{location}: found schema {show(str(data['schema']))}, expected {SCHEMA_VERSION};"
                " plan the run again"
            )
        plan = read_typed(cls, data, location)
        if not plan.rank_plans or not all(rank.peaks for rank in plan.rank_plans):
            raise ConfigError(
                f"{location}: found a plan without peaks; expected at least one rank and phase"
            )
        return plan


def read_plan(path: Path) -> Plan:
    """Return the plan in a JSON file. Raises ConfigError if it cannot be read or holds no plan."""
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


def read_typed(declared: Any, value: Any, location: str) -> Any:
    """Return a JSON value as the type `declared`: a dataclass, a list, a dict, a union or a scalar.

    location: where the value stands, for errors. Keys that a dataclass does not have are ignored.
    A union is a type or None. Raises ConfigError for a value of another type, a number of 2^63 or
    more, and a missing key without a default.
    """
    origin = get_origin(declared)
    arguments = get_args(declared)
    # NaN is refused as well: it compares as less than no number.
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise ConfigError(f"{location}: found {show(str(value))}, expected a number below 2^63")
    if declared is Any:
        return value
    if origin in (Union, types.UnionType):
        member_type = next(part for part in arguments if part is not type(None))
        return None if value is None else read_typed(member_type, value, location)
    if is_dataclass(declared) and isinstance(value, Mapping):
        return _read_fields(declared, value, location)
    if origin is list and isinstance(value, list):
        return [
            read_typed(arguments[0], item, f"{location}[{index}]")
            for index, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, Mapping):
        return {
            str(name): read_typed(arguments[1], item, f"{location}.{name}")
            for name, item in value.items()
        }
    # JSON may write a float without its point.
    if declared is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # Not isinstance: a bool is no int here.
    if isinstance(declared, type) and type(value) is declared:
        return value
    name = getattr(origin or declared, "__name__", str(declared))
    raise ConfigError(
        f"{location}: found {quote(str(value))}, expected"
        f" {'an object' if is_dataclass(declared) else name}"
    )


def _read_fields(schema: Any, value: Mapping[str, Any], location: str) -> Any:
    """Return the dataclass `schema` with its fields from a JSON object.

    location: as in `read_typed`.
    """
    types_by_name = get_type_hints(schema)
    arguments = {}
    for entry in fields(schema):
        name = entry.name
        if name in value:
            arguments[name] = read_typed(types_by_name[name], value[name], f"{location}: {name}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(
                f"{location}: found no `{name}`; expected all keys of {schema.__name__}"
            )
    return schema(**arguments)
