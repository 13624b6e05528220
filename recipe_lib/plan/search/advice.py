"""What one change of a config does to its peak and its step, each tried alone."""

from dataclasses import dataclass, field, replace
from typing import Any

from recipe_lib.plan.build_plan import PlanSettings
from recipe_lib.plan.result import DOES_NOT_FIT, Advice, Plan
from recipe_lib.plan.search.estimate import Estimate
from recipe_lib.plan.search.expert_adapters import compared_text, other_targets
from recipe_lib.plan.search.long_sequences import LONG_SEQUENCE, is_long, traffic_text, ways_to_share
from recipe_lib.plan.search.search_space import data_ranks
from recipe_lib.plan.search.trials import (
    QUANTIZE_TEACHER,
    STREAM_KEY,
    STREAM_TEACHER,
    Changes,
    changed,
    checkpointing,
    in_processes,
    override_text,
    stepped_in_backward,
    streamed,
    teacher_in_memory,
    try_quick,
    usable_bytes,
    with_ranks,
)
from recipe_lib.plan.tracing.simulate import FIRST, STEADY
from recipe_lib.units import format_bytes

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"

# A change of less than this share is none.
MIN_CHANGE = 0.002

# From least to most memory.
CHECKPOINTING = ("full", "selective", "none")
QUANTIZED = ("nf4", "int8", "none")
MAX_LOSS_CHUNKS = 64


@dataclass(frozen=True)
class Lever:
    """One change to try. changes: of the config. text: to type before them. ranks: in place of the run's. tokens,
    documents: of a packed sequence, where they change. timed: whether the change of the step's time is known. note: for
    who reads the advice. sends: what it sends is reported too. weighed: a choice that is shown whichever way it lies,
    also where it gains nothing."""

    changes: Changes = field(default_factory=dict)
    note: str = ""
    text: str = ""
    ranks: int | None = None
    tokens: int | None = None
    documents: float | None = None
    timed: bool = True
    sends: bool = False
    weighed: bool = False


@dataclass(frozen=True)
class Tried:
    """A lever and what the run takes with it. usable: bytes that the allocator may then take."""

    lever: Lever
    quick: Estimate
    usable: int


def try_levers(recipe_class: type, cfg: Any, settings: PlanSettings) -> tuple[Estimate | None, list[Tried]]:
    """The run as it is, None where it could not be tried, and with each lever.

    In several processes if nothing has been simulated in this one yet: before its own plan is made is the better time.
    """
    jobs = [(Lever(), cfg, settings)]
    for lever in levers(cfg, settings):
        other = changed(cfg, lever.changes)
        if other is not None:
            jobs.append((lever, other, _settings_with(settings, lever)))
    found = in_processes(lambda job: try_quick(recipe_class, job[1], job[2]), jobs, "trying levers")
    tried = [
        Tried(lever, result, usable_bytes(other, held))
        for (lever, other, held), result in zip(jobs[1:], found[1:], strict=True)
        if result is not None
    ]
    return found[0], tried


def advice_from(plan: Plan, base: Estimate | None, tried: list[Tried]) -> list[Advice]:
    """What each lever does to the plan: those that make it fit (or, where it fits, faster) first, then by bytes gained;
    of the ways to have room for a long sequence that fit, the fastest first.

    Bytes are of the active peak, off by 0.5 % of it at most; whether it then fits is an estimate, some percent off.
    Levers that the config's table of combinations or the recipe refuses are left out, and so is what neither lowers the
    peak nor makes the step faster, unless it is `weighed`.
    """
    has_room = plan.verdict != DOES_NOT_FIT
    rows, ways = [(False, row) for row in _expandable(plan)], []
    for one in tried if base is not None else []:
        assert base is not None
        gained, saved = one.quick.active - base.active, one.quick.seconds - base.seconds
        less, faster = gained < -MIN_CHANGE * base.active, saved < -MIN_CHANGE * base.seconds
        row = Advice(
            override=" ".join(filter(None, [one.lever.text, override_text(one.lever.changes)])),
            bytes=gained,
            seconds=saved if one.lever.timed else None,
            fits=_fits(plan, base, one),
            note="; ".join(filter(None, [one.lever.note, *_elsewhere(one, base)])),
        )
        gives_speed = faster and has_room and row.fits and one.lever.timed
        if one.lever.sends:
            ways.append(row)
        if less or gives_speed or one.lever.weighed:
            rows.append((gives_speed, row))
    rows.sort(key=lambda pair: (not pair[1].fits, not pair[0], (pair[1].seconds or 0.0) if pair[0] else pair[1].bytes))
    return _cheapest_way_first([row for _, row in rows], {id(row) for row in ways})


def _elsewhere(one: Tried, base: Estimate) -> list[str]:
    """What is sent, where that is to be said, and what more of it is kept in host memory."""
    sent = [traffic_text(one.quick, base)] if one.lever.sends else []
    more = one.quick.host > base.host + MIN_CHANGE * base.active
    return [*sent, *([f"{format_bytes(one.quick.host)} of host memory"] if more else [])]


def _cheapest_way_first(rows: list[Advice], ways: set[int]) -> list[Advice]:
    """The ways to have room for a long sequence that fit change places, so that the fastest of them is first."""
    places = [at for at, row in enumerate(rows) if id(row) in ways and row.fits]
    fastest = sorted((rows[at] for at in places), key=lambda row: row.seconds or 0.0)
    for at, row in zip(places, fastest, strict=True):
        rows[at] = row
    return rows


def _fits(plan: Plan, base: Estimate, one: Tried) -> bool:
    """As the verdict counts it, with expandable segments: the plan's own peak, and what the lever changes of it; of
    loading, validation and saving what they take beyond what is alive between steps, which the lever may change."""
    steps = [peak.reserved_expandable for peak in plan.heaviest.peaks if peak.phase in (FIRST, STEADY)]
    others = [peak.active for peak in plan.heaviest.peaks if peak.phase not in (FIRST, STEADY)]
    planned = max(steps, default=0) + one.quick.reserved_expandable - base.reserved_expandable
    beyond = max((peak - base.held for peak in others), default=0)
    return max(planned, one.quick.held + max(beyond, 0)) <= one.usable


def _expandable(plan: Plan) -> list[Advice]:
    rank = plan.heaviest
    gained = rank.reserved_expandable - rank.reserved
    if gained >= -MIN_CHANGE * rank.reserved:
        return []
    fits = rank.reserved_expandable <= plan.device.usable
    return [Advice(EXPANDABLE, gained, 0.0, fits, "an environment variable; less reserved memory lies idle")]


def _settings_with(settings: PlanSettings, lever: Lever) -> PlanSettings:
    sequence = settings.sequence
    tokens = min(sequence.tokens, lever.tokens or sequence.tokens) if lever.documents is None else lever.tokens
    pack = lever.documents or sequence.pack * (tokens or sequence.tokens) / sequence.tokens
    settings = replace(settings, sequence=replace(sequence, tokens=tokens or sequence.tokens, pack=max(1.0, pack)))
    return with_ranks(settings, lever.ranks) if lever.ranks else settings


def levers(cfg: Any, settings: PlanSettings) -> list[Lever]:
    """Everything that could be changed, in either direction."""
    return [*_batch_sizes(cfg), *_layers(cfg), *_sharding(cfg, settings.ranks), *_weights(cfg), *_length(cfg, settings)]


def _batch_sizes(cfg: Any) -> list[Lever]:
    size, turns = cfg.batch_size, cfg.gradient_accumulation_steps
    found = []
    if size > 1:
        smaller = next(other for other in range(size // 2, 0, -1) if size % other == 0)
        changes = {"batch_size": smaller, "gradient_accumulation_steps": turns * size // smaller}
        found.append(Lever(changes, "the same sequences a step"))
    if turns % 2 == 0:
        changes = {"batch_size": 2 * size, "gradient_accumulation_steps": turns // 2}
        found.append(Lever(changes, "the same sequences a step"))
    return found


def _layers(cfg: Any) -> list[Lever]:
    """What is kept for backward, and logits."""
    own = cfg.memory.activation_checkpointing
    found = [Lever(checkpointing(cfg, kind)) for kind in CHECKPOINTING if kind != own]
    if cfg.memory.loss_chunks < MAX_LOSS_CHUNKS:
        found.append(Lever({"memory.loss_chunks": min(4 * cfg.memory.loss_chunks, MAX_LOSS_CHUNKS)}))
    if cfg.max_seq_len >= LONG_SEQUENCE and cfg.memory.mlp_tiles == 1:
        found.append(Lever({"memory.mlp_tiles": cfg.max_seq_len // (LONG_SEQUENCE // 2)}))
    if not cfg.memory.activation_offload:
        offload = {"memory.activation_offload": True}
        found.append(Lever(offload, "kept in host memory meanwhile", sends=is_long(cfg), weighed=is_long(cfg)))
    return found


def _sharding(cfg: Any, ranks: int) -> list[Lever]:
    """What a rank holds of the model."""
    parallel, found = cfg.parallel, []
    weighed = is_long(cfg)
    found += [Lever(changes, note, sends=weighed, weighed=weighed) for changes, note in ways_to_share(cfg, ranks)]
    if ranks > 1:
        if parallel.fsdp_wrap_policy in ("auto", "layers"):
            found.append(Lever({"parallel.fsdp_wrap_policy": "memory_efficient"}))
        found.append(Lever({"parallel.reshard_after_forward": not parallel.reshard_after_forward}))
        found += _reductions(parallel)
        if parallel.data_replicate > 1:
            found.append(Lever({"parallel.data_replicate": 1, "parallel.data_shard": -1}))
        if parallel.data_shard == -1 and data_ranks(cfg, ranks) % (2 * parallel.data_replicate) == 0:
            found.append(Lever({"parallel.data_replicate": 2 * parallel.data_replicate}, "copies of the sharded model"))
        whole = parallel.strategy == "ddp"
        found.append(
            Lever({"parallel.strategy": "fsdp" if whole else "ddp"}, "" if whole else "whole models, nothing gathered")
        )
        if parallel.reduce_dtype == "fp32" and cfg.dtype == "bf16":
            found.append(Lever({"parallel.reduce_dtype": None}, "gradients are summed in bf16: less exact"))
    turns, changes, note = cfg.gradient_accumulation_steps, {}, "more sequences a step"
    if turns % 2 == 0:
        changes, note = {"gradient_accumulation_steps": turns // 2}, "the same sequences a step"
    if parallel.data_shard == -1:
        found.append(Lever(changes, note, text=f"--nproc_per_node {2 * ranks}", ranks=2 * ranks))
    found += _streaming(cfg)
    offload = not cfg.memory.cpu_offload
    slow = "the optimizer runs on the CPU and parameters cross PCIe"
    found.append(Lever({"memory.cpu_offload": offload}, slow if offload else ""))
    return found


def _streaming(cfg: Any) -> list[Lever]:
    """Layers in host memory, or on the device again."""
    if cfg.memory.stream_layers:
        return [Lever({STREAM_KEY: False})]
    note = "layers are in host memory, and copied one ahead of the one that computes"
    if cfg.trained_adapters is None:
        note += f"; each is stepped in backward: {_not_done_in_backward(cfg)}"
    return [Lever(streamed(cfg), note)]


def _not_done_in_backward(cfg: Any) -> str:
    """What a step loses where parameters are stepped in backward."""
    accumulates = cfg.gradient_accumulation_steps > 1
    return "gradients are not clipped" + (", and a step has fewer sequences" if accumulates else "")


def _reductions(parallel: Any) -> list[Lever]:
    """When gradients are reduced; left out where a step has one micro-batch, as that is then without effect."""
    key, keeping = "parallel.reduce_gradients", {"parallel.reshard_after_forward": False}
    if parallel.reduce_gradients == "step":
        return [Lever({key: "micro_batch"}, "reduced in every backward, none whole on a rank")]
    once = Lever({key: "step"}, "whole gradients on every rank, reduced once a step")
    if not parallel.reshard_after_forward:
        return [once]
    return [once, Lever({key: "step"} | keeping, "whole weights and gradients (ZeRO-1), gathered and reduced once")]


def _weights(cfg: Any) -> list[Lever]:
    """What is trained, in which type, by which optimizer."""
    found = []
    if cfg.matmul_dtype is None:
        found.append(Lever({"matmul_dtype": "int8"}, "products of rounded operands: compare the losses"))
    if cfg.dtype == "fp32":
        found.append(Lever({"dtype": "bf16"}, "other rounding: compare the losses"))
    if cfg.optimizer.implementation not in ("auto", "fused"):
        found.append(Lever({"optimizer.implementation": "fused"}))
    if not cfg.memory.optimizer_offload:
        found.append(Lever({"memory.optimizer_offload": True}, "optimizer states on the host, fetched for their step"))
    if not cfg.memory.optimizer_in_backward:
        found.append(Lever(stepped_in_backward(cfg), _not_done_in_backward(cfg)))
    if cfg.optimizer.name == "adamw":
        if cfg.optimizer.state_bits is None:
            found.append(Lever({"optimizer.state_bits": 8}, "states are rounded to 8 bits"))
        found.append(Lever({"optimizer.name": "sgd"}, "another optimizer, without states: needs its own optimizer.lr"))
    adapters = cfg.trained_adapters
    if adapters is None and cfg.adapters_instead:
        found.append(Lever(cfg.adapters_instead, "trains adapters in place of every parameter"))
    elif adapters is not None:
        note = "frozen weights are rounded"
        found += [
            Lever({"lora.quantize_base": kind}, note)
            for kind in QUANTIZED
            if kind not in (adapters.quantize_base, "none")
        ]
        if adapters.quantize_base != "none":
            found.append(Lever({"lora.quantize_base": "none"}, "frozen weights are not rounded"))
        if adapters.rank > 1 and adapters.adapter_path is None:
            found.append(Lever({"lora.rank": adapters.rank // 2}, "smaller adapters"))
        if targets := other_targets(cfg):
            found.append(Lever({"lora.target_modules": targets}, compared_text(cfg, targets), weighed=True))
    return found + _teacher(cfg)


def _teacher(cfg: Any) -> list[Lever]:
    """Of a run that has a teacher in memory."""
    teacher = teacher_in_memory(cfg)
    if teacher is None:
        return []
    found = [
        Lever({QUANTIZE_TEACHER: kind}, "the teacher's weights are rounded")
        for kind in QUANTIZED
        if kind not in (teacher.quantize_teacher, "none")
    ]
    if not teacher.stream_teacher:
        found.append(Lever({STREAM_TEACHER: True}, "the teacher's layers are in host memory"))
    return found


def _length(cfg: Any, settings: PlanSettings) -> list[Lever]:
    """Longer and shorter sequences."""
    sequence, found = settings.sequence, []
    if sequence.tokens > 1:
        half = sequence.tokens // 2
        note = (
            "shorter packs: more of them"
            if cfg.data.packing
            else f"data.truncation={cfg.data.truncation} for longer sequences"
        )
        found.append(Lever({"max_seq_len": half}, note, tokens=half, timed=False))
    histogram = sequence.histogram
    if histogram and not cfg.data.packing and 2 * histogram["p50"] <= cfg.max_seq_len and sequence.group == 1:
        documents = cfg.max_seq_len / histogram["p50"]
        note = f"about {documents:.0f} documents in a sequence of {cfg.max_seq_len} tokens, in place of one and padding"
        found.append(Lever({"data.packing": True}, note, tokens=cfg.max_seq_len, documents=documents, timed=False))
    return found
