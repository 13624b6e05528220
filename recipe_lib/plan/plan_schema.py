"""The dataclasses of a plan, and its JSON: what a run will take, as numbers.

`build_plan.make_plan` makes a `Plan`, reports and searches read it, `Plan.to_json` and `read_plan`
write it and read it again. docs/plan_json.md describes the keys. No torch in here.
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

# Raised when a key changes its meaning or goes away; a new key does not raise it.
SCHEMA_VERSION = 5

FITS = "fits"
RISKY = "risky"
DOES_NOT_FIT = "does not fit"
HOST_ALLOWS = "memory.host_memory_limit_gib allows"  # begins the assumption whether it is enough


@dataclass
class Volume:
    """Communication, summed up."""

    # Calls, each counted on every rank that takes part; a message is a send and a receive.
    operations: float = 0
    # Of the whole tensors of these calls: the gathered one, the one before it is scattered, the
    # reduced one, the message.
    bytes: float = 0
    # That ranks send for them by a ring; a receive sends none.
    wire_bytes: float = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.operations + other.operations,
            self.bytes + other.bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def multiply(self, factor: int) -> "Volume":
        """Return so many of it."""
        return Volume(self.operations * factor, self.bytes * factor, self.wire_bytes * factor)

    def divide(self, count: int) -> "Volume":
        """Return one of `count` equal parts of it; whole numbers stay whole where they can."""
        return Volume(
            *(size // count if size % count == 0 else size / count for size in astuple(self))
        )


@dataclass
class DimensionPlan:
    """Communication along a dimension of the mesh with more than one rank."""

    # Name of the dimension; `world`: several of them as one.
    dim: str
    # The dimensions along which the ranks of a group differ.
    along: list[str]
    # The ranks of every group, in the order of their first ones; together they are all ranks.
    groups: list[list[int]]
    # Of a steady step, one rank of each place in the pipeline, first to last.
    rank_step: list[Volume] = field(default_factory=list)
    # The same of one micro-batch, forward and backward.
    rank_micro_batch: list[Volume] = field(default_factory=list)
    # Of a steady step, all ranks; None if not every place was planned.
    cluster_step: Volume | None = None
    # The same of one micro-batch.
    cluster_micro_batch: Volume | None = None
    # Of one micro-batch forward and backward through one transformer layer on one rank, as most
    # layers have it; None if layers communicate nothing along it.
    layer: Volume | None = None


def list_rank_groups(mesh: Mapping[str, int], along: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group: those that differ in the dimensions `along` alone.

    mesh: name to size, outermost first; a rank is its place in the order of all coordinates.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*map(range, mesh.values()))):
        # What all ranks of a group have in common.
        key = tuple(
            coordinate
            for name, coordinate in zip(mesh, coordinates, strict=True)
            if name not in along
        )
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


@dataclass
class PhasePeak:
    """The most memory that one phase holds at a time, bytes."""

    # `setup`, `load`, `first step`, `step`, `validation` or `save`.
    phase: str
    # In blocks that the caching allocator handed out, each a multiple of 512 bytes, and in freed
    # ones that a stream still uses: torch's `active_bytes.all.peak`.
    active: int
    # In blocks handed out: `allocated_bytes.all.peak`.
    allocated: int
    # Taken from the device by the default allocator: `reserved_bytes.all.peak`.
    reserved: int
    # The same with `expandable_segments:True`.
    reserved_expandable: int
    # In tensors of host memory.
    host: int
    # What was running when the most was requested: a part of the step, and a module.
    part: str = ""
    module: str = ""
    # In tensors that are live, as they were asked for: `requested_bytes.all.peak`.
    requested: int = 0


@dataclass
class Alive:
    """Storages of one kind and module that are live when the most bytes are requested."""

    # Of memory, such as `parameters`.
    kind: str
    # Dotted path of the module that was running; empty: outside of modules.
    module: str
    # The parameter's name where one is known.
    label: str
    # Of all of them, as they were asked for.
    bytes: int
    # Of storages.
    count: int


@dataclass
class OutsideTorch:
    """Device memory that no allocator of torch hands out, bytes."""

    # The driver's, with the loaded kernels.
    context: int
    # Buffers of all communicators.
    nccl: int
    # Kept free for kernels that are loaded late, a display, other programs.
    reserve: int = 0

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.context + self.nccl + self.reserve


@dataclass
class RankPlan:
    """The memory of one rank."""

    rank: int
    # Mesh dimension to the place in it.
    coordinates: dict[str, int]
    # In the order of the phases.
    peaks: list[PhasePeak]
    # At the largest peak of active bytes, largest first.
    alive: list[Alive]
    # Allocations and frees that were replayed.
    events: int = 0
    # Kind of memory to the most bytes that it takes at a time in a steady step, as asked for.
    most: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> PhasePeak:
        """Return the phase in which the most is active."""
        return max(self.peaks, key=lambda peak: peak.active)

    @property
    def reserved(self) -> int:
        """Return the most that is reserved in any phase, default allocator."""
        return max(peak.reserved for peak in self.peaks)

    @property
    def reserved_expandable(self) -> int:
        """Return the same with expandable segments."""
        return max(peak.reserved_expandable for peak in self.peaks)

    @property
    def host(self) -> int:
        """Return the most host memory of any phase."""
        return max(peak.host for peak in self.peaks)


@dataclass
class LayerRow:
    """A module in the layer table; bytes and elements are of all parameters in it."""

    # Dotted path.
    module: str
    # Name of its class.
    type: str
    # Elements, of the full model.
    parameters: int
    # Those of them that are trained.
    trained: int
    # Of its parameters, without parallelism.
    bytes: int
    # Of this rank's share of them.
    local_bytes: int
    # Activation bytes that this rank keeps of it for backward at the peak of the steady step's
    # forward, with what is inside; a tensor is of the module whose output it is, or else of the one
    # whose weight alone reads it.
    kept: int = 0
    # Its own parameters by name, with their shapes as this rank computes with them: gathered where
    # FSDP shards them, its shard of them in tensor parallel.
    weights: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class CommunicationRow:
    """Collectives of a steady step that are alike."""

    # Such as `all_gather`.
    operation: str
    # Mesh dimension of the group.
    dim: str
    # Members of the group.
    ranks: list[int]
    # Part of the step.
    where: str
    # Dotted path of what was running.
    module: str
    # Of this rank's tensors.
    shapes: list[list[int]]
    # Such as `bf16`.
    dtype: str
    # Of the whole tensor of one collective.
    bytes: int
    # That one rank sends for one.
    wire_bytes: int
    # Of collectives in a step.
    count: int
    # Of one, alone.
    seconds: float


@dataclass
class TimePlan:
    """A steady step in seconds, of the heaviest rank.

    In a pipeline it is that of the rank that computes the longest.
    """

    # Kernels.
    compute: float
    # Collectives, alone.
    communication: float
    # The part of it that no kernel hides.
    exposed: float
    # For the host to issue it all.
    launch: float
    # All of it, with waiting for other ranks of a pipeline.
    step: float
    # Of all ranks.
    tokens_per_step: int
    # Of all ranks.
    tokens_per_second: float
    # Share of the devices' dense rate.
    mfu: float
    # Of the run; None where they are not known.
    steps: int | None
    # Seconds of the run; None likewise.
    total: float | None
    # The rates are measured ones.
    calibrated: bool
    # How far off the times may be, in words.
    error: str
    # Between host and device, alone.
    copies: float = 0.0
    # The part of them that no kernel hides.
    copies_exposed: float = 0.0
    # That the host computes itself, its optimizer first of all.
    on_host: float = 0.0
    # Of kernels, each alone, by what they do.
    matmuls: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    # While nothing runs: the host launches, or streams or other ranks are waited for.
    idle: float = 0.0
    # That the host issues.
    operators: int = 0
    # The step of a mixture of experts if all tokens of a micro-batch are computed by the same ones;
    # None without a mixture.
    same_experts: float | None = None


@dataclass
class ActionSpan:
    """A forward or backward of one micro-batch on a rank of a pipeline."""

    # Of the rank in its pipeline.
    place: int
    # That runs the micro-batch.
    stage: int
    # `F` forward, `B` backward, or its halves: `I` gradient of the input, `W` gradients of the
    # weights.
    kind: str
    # Number in the step.
    micro_batch: int
    # Seconds since the first action of the step began.
    start: float
    end: float


@dataclass
class StagePlan:
    """The stages of one place in a pipeline; its memory is in the rank plan of `rank`."""

    # In the pipeline.
    place: int
    # That was planned for it.
    rank: int
    # Their numbers.
    stages: list[int]
    # First and last layer of each.
    layers: list[list[int]]
    # Elements, without other parallelism.
    parameters: int
    # Those of them that are trained.
    trained: int
    # The most micro-batches between forward and backward at a time, each stage counted.
    in_flight: int
    # The most micro-batches with deferred weight gradients.
    deferred: int
    # Seconds of a step that it computes.
    compute: float
    # Share of the pipeline's time in which it does not compute.
    idle: float
    # Tensors of a step that it sends.
    sends: int
    # Their bytes.
    sent: int
    # All that have these stages.
    ranks: list[int] = field(default_factory=list)


@dataclass
class PipelinePlan:
    """A step of a pipeline."""

    # Name of the order of its micro-batches.
    schedule: str
    stages_per_rank: int
    # Of a step.
    micro_batches: int
    # Sequences of each.
    micro_batch_size: int
    # First to last.
    places: list[StagePlan]
    # From the first forward to the last backward; None where places or times were left out.
    seconds: float | None = None
    # Share of all ranks' time in it in which they do not compute; None likewise.
    bubble: float | None = None
    # The bubble of equal stages whose tensors arrive at once.
    ideal: float | None = None
    # What all ranks compute; empty where places or times were left out.
    spans: list[ActionSpan] = field(default_factory=list)


@dataclass
class Advice:
    """One lever and its effect."""

    # To type.
    override: str
    # Change of the peak on the device; negative: room gained.
    bytes: int
    # Change of the step; None: not planned.
    seconds: float | None
    # Whether the run then fits.
    fits: bool
    # What else it means.
    note: str = ""


@dataclass
class DeviceFacts:
    """The device planned for."""

    # Such as `rtx4090`.
    name: str
    # Total bytes.
    memory: int
    # Bytes that the allocator may take: the total without `outside`.
    usable: int
    # Such as `sm89`.
    architecture: str
    # Dense rate of the run's dtype, per second.
    flops: float
    # Of its memory, bytes per second.
    bandwidth: float
    # Between ranks, such as `pcie_p2p`.
    link: str
    # Bytes per second of large messages.
    link_bandwidth: float


@dataclass
class Plan:
    """Everything `tune plan` knows about one run; `to_json` is the stable form."""

    # As typed, like `config` and `overrides`.
    recipe: str
    config: str
    overrides: list[str]
    # Its preset or folder.
    model: str
    # Of the run.
    ranks: int
    # Dimension to its size.
    mesh: dict[str, int]
    device: DeviceFacts
    # `tokens`: sequence length planned, `source`: where it is from, `histogram`, ...
    sequence: dict[str, Any]
    # FITS, RISKY or DOES_NOT_FIT.
    verdict: str
    # Usable memory left at the heaviest rank, bytes; negative: short of.
    margin: int
    # Of the ranks traced.
    rank_plans: list[RankPlan]
    # Memory that torch does not hand out.
    outside: OutsideTorch
    # Of the model.
    layers: list[LayerRow]
    # Of a steady step, the heaviest rank.
    communication: list[CommunicationRow]
    # None where it was not planned.
    time: TimePlan | None
    # None without one.
    pipeline: PipelinePlan | None = None
    # Levers, each tried alone.
    advice: list[Advice] = field(default_factory=list)
    # One sentence each.
    assumptions: list[str] = field(default_factory=list)
    # One sentence each.
    not_modeled: list[str] = field(default_factory=list)
    # Program to version.
    versions: dict[str, str] = field(default_factory=dict)
    # Why the figures are not those of all micro-batches and steps; empty where they are.
    estimate: str = ""
    # Those of the assumptions that concern this machine and the start of a run.
    notes: list[str] = field(default_factory=list)
    # What to change next, in words.
    next_lever: str = ""
    # Ranks of one machine, neighbors in their numbers; 0: not known.
    ranks_per_node: int = 0
    # Of the mesh, those with more than one rank, and what all ranks communicate along them.
    dimensions: list[DimensionPlan] = field(default_factory=list)
    # The full model on one device, without parallelism, with the same micro-batches; None where it
    # was not planned (without `--full`) or is this very run.
    alone: RankPlan | None = None
    # Known cards of the least memory on which as many ranks fit with room to spare, by this plan's
    # peak; empty: on none.
    smallest_cards: list[str] = field(default_factory=list)
    # Numbers of ranks that were planned to find the fewest that fit.
    tried_ranks: list[int] = field(default_factory=list)
    # Of this device; None: not looked for (without `--advice`), or none of those tried.
    fewest_ranks: int | None = None
    # Of the runs on this machine that were planned and measured, the one that is most like this, in
    # a line; empty: there is none of this device and recipe.
    receipt: str = ""
    # From the import of the planner to the plan; in no file, so that a plan is the same bytes every
    # time.
    seconds: float = field(default=0.0, compare=False)

    @property
    def heaviest(self) -> RankPlan:
        """Return the rank that reserves the most."""
        return max(self.rank_plans, key=lambda rank: rank.reserved)

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists; bytes, seconds, tokens."""
        plain = {"schema": SCHEMA_VERSION, **asdict(self)}
        del plain["seconds"]
        return plain

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "Plan":
        """Return the plan that `to_json` wrote; keys that this version lacks are passed over.

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
    """Return the plan in a JSON file; ConfigError if there is none."""
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


def read_typed(declared: Any, value: Any, place: str) -> Any:
    """Return a JSON value as the type that a field is declared with.

    Keys that a dataclass does not have are passed over. place: of the value, for errors.
    ConfigError for a value of another type, and a key without a default that is missing.
    """
    origin = get_origin(declared)
    arguments = get_args(declared)
    # NaN is refused as well: it compares as less than no number.
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise ConfigError(f"{place}: found {show(str(value))}, expected a number below 2^63")
    if declared is Any:
        return value
    if origin in (Union, types.UnionType):
        kind = next(part for part in arguments if part is not type(None))
        return None if value is None else read_typed(kind, value, place)
    if is_dataclass(declared) and isinstance(value, Mapping):
        return _read_fields(declared, value, place)
    if origin is list and isinstance(value, list):
        return [
            read_typed(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, Mapping):
        return {
            str(name): read_typed(arguments[1], item, f"{place}.{name}")
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
        f"{place}: found {quote(str(value))}, expected"
        f" {'an object' if is_dataclass(declared) else name}"
    )


def _read_fields(schema: Any, value: Mapping[str, Any], place: str) -> Any:
    """Return the dataclass `schema` with its fields from a JSON object."""
    types_by_name = get_type_hints(schema)
    arguments = {}
    for entry in fields(schema):
        name = entry.name
        if name in value:
            arguments[name] = read_typed(types_by_name[name], value[name], f"{place}: {name}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"{place}: found no `{name}`; expected all keys of {schema.__name__}")
    return schema(**arguments)
