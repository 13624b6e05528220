"""The loop around a recipe's training step: records, when to validate and to save, how it may
end.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.checkpoint.run_files import BEST_RECORD, read_manifest
from recipe_lib.config.local_files import STATE_FOLDER
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import StepBatches
from recipe_lib.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    StoppedAndSaved,
    get_first_line,
)
from recipe_lib.logs import get_logger
from recipe_lib.memory import PeakMemory, explain_out_of_memory
from recipe_lib.memory.peaks import Peaks
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.optim.optimizers import OptimizerLevers, compute_learning_rate, set_hyperparameters
from recipe_lib.parallel.heartbeat import FIRST_STEP_SECONDS, STEP_SECONDS
from recipe_lib.parallel.world import World
from recipe_lib.report.phases import phase
from recipe_lib.training.metrics import step_metrics
from recipe_lib.training.output import check_same_data
from recipe_lib.training.run import check_same_batches
from recipe_lib.training.run_log import STOPPED_EARLY, RunLog, data_facts
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import convert_to_gib


@dataclass
class Step:
    """What an optimizer step leaves, on device or host; tensors of one element."""

    loss: torch.Tensor
    """The mean loss."""
    grad_norm: torch.Tensor
    """Norm of the gradient over all parameters, before it was clipped."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further numbers of a recipe, by name; the same on every rank."""

    def numbers(self) -> tuple[float, float, dict[str, float]]:
        """Return (loss, norm of the gradient, metrics) on the host, which waits for the device
        once.
        """
        tensors = [self.loss, self.grad_norm, *self.metrics.values()]
        together = [
            tensor.to(torch.float64).reshape(())
            for tensor in tensors
            if tensor.device.type != "cpu"
        ]
        read = iter(torch.stack(together).cpu() if together else ())
        loss, norm, *metrics = (
            float(tensor if tensor.device.type == "cpu" else next(read)) for tensor in tensors
        )
        return loss, norm, dict(zip(self.metrics, metrics, strict=True))


def build_lr_schedule(cfg: FullFinetuneConfig, total_steps: int) -> Callable[[int], float]:
    """Return what gives the learning rate of a step, which counts from 0, of `total_steps`."""
    return partial(
        compute_learning_rate, cfg.lr_scheduler, cfg.optimizer.lr, total_steps=total_steps
    )


class TrainingLoop:
    """The steps of a run, one after the other; every rank goes through the same calls.

    with TrainingLoop(cfg, world, model, optimizer, data, done=step) as loop:
        for batches in loop.steps():
            learning_rate = schedule(loop.step)
            set_learning_rate(optimizer, learning_rate)
            step = train_step(batches)
            loop.finish(step, batches, learning_rate=learning_rate, validate=validate)

    Out of memory inside the block becomes one line with the levers that are left.
    """

    step: int
    """Optimizer steps done."""
    total_steps: int

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        data: TrainingData,
        *,
        done: int,
    ) -> None:
        """done: steps that an earlier process has trained."""
        self.step = done
        self.total_steps = data.total_steps
        self._cfg, self._world, self._model, self._optimizer, self._data = (
            cfg,
            world,
            model,
            optimizer,
            data,
        )
        self._peak = PeakMemory(world.device)
        self._probe = CommunicationProbe(cfg.log.communication_step, world)
        if cfg.qat is not None and cfg.qat_start_step >= self.total_steps:
            raise ConfigError(
                f"qat_start_step: found {cfg.qat_start_step} for a run of {self.total_steps} steps,"
                f" none of which would train in {cfg.qat}; choose less, or remove qat"
            )
        self._began = 0.0
        self._told_of_zero = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(explain_out_of_memory("training", self._cfg, self._peak))
            # What a recipe raises in its loop over micro-batches leaves the pipeline's generator
            # behind, which cannot see it. Inside of the former, which quotes what is added.
            stack.enter_context(self._world.heartbeat.name_action_in_errors())
            facts = data_facts(self._data)
            log = RunLog(self._cfg, self._world, self.total_steps, done=self.step, data=facts)
            self._log = stack.enter_context(log)
            self._stop = stack.enter_context(StopSignal())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        self._probe.end(0.0)  # of a step that was not finished
        self._world.heartbeat.is_ending = exception[0] is not None
        if exception[0] is None:
            best, is_early = (
                self._data.best,
                self.step < self.total_steps and self._data.best.is_waited_out,
            )
            self._log.close(STOPPED_EARLY if is_early else "done", best.facts(self.total_steps))
        return self._stack.__exit__(*exception)

    def steps(self) -> Iterator[StepBatches]:
        """Yield the batches of each step that is left; `finish` ends a step.

        With `checkpoint.keep_best` the model has the weights of the best step when there are no
        more.
        """
        source, first = self._data.batches(self.step), True
        while not self._is_over():
            self._world.heartbeat.enter(
                f"step {self.step + 1}", FIRST_STEP_SECONDS if first else STEP_SECONDS
            )
            self._probe.begin(self.step + 1)
            self._began = time.perf_counter()
            self._peak.reset()
            batches = replace(next(source), step=self.step)
            if first:
                check_same_batches(batches, self._world)
                first = False
            yield batches
            del batches
        self._world.heartbeat.enter("loading the best step")
        self._data.best.load(self._model, self.step, self.total_steps, self._world)
        self._world.heartbeat.enter("exporting")

    def _is_over(self) -> bool:
        return self.step >= self.total_steps or self._data.best.is_waited_out

    def finish(
        self,
        step: Step,
        batches: StepBatches,
        *,
        learning_rate: float,
        validate: Callable[[], Mapping[str, float]],
    ) -> None:
        """Record a step, then validate and save where that is due.

        learning_rate: that the step has trained with, for the log. validate: gives the numbers of a
        validation: at each `validation.every_n_steps`-th step, else at the end of each epoch, and
        after the last; by one of them it is known which step is best (`checkpoint.best_metric`).
        Raise DivergedError if loss or gradient are not finite, or what would be saved or exported;
        StoppedAndSaved once any rank was asked to stop.
        """
        heartbeat = self._world.heartbeat
        self._record(step, batches, learning_rate)
        if self._validation_is_due():
            heartbeat.enter(f"validation after step {self.step}")
            with phase("validating"):
                numbers = dict(validate())
            self._log.validation({"step": self.step} | numbers)
            self._judge(numbers)
            heartbeat.enter(f"end of step {self.step}")
        stopped = self._stop.agreed(self._world)
        is_last, every = self._is_over(), self._cfg.checkpoint.save_every_n_steps
        saves = stopped or (every is not None and (self.step % every == 0 or is_last))
        if saves or is_last:
            self._check_weights()
        if saves:
            heartbeat.enter(f"saving step {self.step}")
            with phase("saving a state to resume from"):
                extra = {
                    "step": self.step,
                    **self._data.identity(),
                    BEST_RECORD: self._data.best.record(),
                }
                path = save_state(
                    Path(self._cfg.output_dir) / STATE_FOLDER,
                    self.step,
                    self._model,
                    self._optimizer,
                    extra,
                    self._world,
                    self._cfg.checkpoint.keep_last_n,
                )
                self._data.best.remove_others(self._world)
        if stopped:
            self._log.close("stopped")
            raise StoppedAndSaved(
                f"stopped after step {self.step}; resume it with resume=latest ({path})"
            )

    def _record(self, step: Step, batches: StepBatches, lr: float) -> None:
        """Wait for the step and write its line; raise DivergedError if its numbers are not
        finite.
        """
        step.metrics |= compute_expert_load(self._model, self._world, self._cfg)
        loss, grad_norm, metrics = step.numbers()  # the one place that waits for the device
        seconds = time.perf_counter() - self._began
        self.step += 1
        self._world.heartbeat.enter(f"recording step {self.step}")
        peak, of_places = _gather_peaks(self._peak.read(), self._world)
        shares = self._probe.end(seconds)
        epoch, steps = self._data.plan.locate(self.step)
        line = step_metrics(
            step=self.step,
            epoch=epoch + steps / self._data.plan.steps(epoch),
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            label_tokens=batches.num_label_tokens,
            total_tokens=batches.total_tokens,
            devices=self._world.size,
            peak=peak,
        )
        self._log.step(line | of_places | shares | metrics, tuple(metrics))
        if shares:
            get_logger().info(
                f"step {self.step}: {shares['communication_share']:.1%} of its time in"
                f" communication, {shares['communication_exposed_share']:.1%} not hidden by"
                f" computation; scaling efficiency {shares['scaling_efficiency']:.1%} (1 - what is"
                " not hidden)"
            )
        if grad_norm == 0.0 and batches.num_label_tokens and not self._told_of_zero:
            self._told_of_zero = True
            get_logger().warning(
                "warning: step %d: the gradient is exactly 0, so nothing is learned; look for"
                " damaged weights, or a frozen model",
                self.step,
            )
        if not (abs(loss) < float("inf") and abs(grad_norm) < float("inf")):
            self._diverged(f"loss {loss} and grad_norm {grad_norm}")

    def _judge(self, numbers: Mapping[str, float]) -> None:
        """Keep the weights of this step, if its validation is the best so far and the config asks
        for it.
        """
        best = self._data.best
        if best.is_asked_for and best.judge(self.step, numbers, self._world) and best.keeps:
            self._check_weights()
            self._world.heartbeat.enter(f"keeping the best step {self.step}")
            with phase("keeping the weights of the best step"):
                best.keep(self.step, self._model, self._world)

    def _check_weights(self) -> None:
        """The last update shows in no loss of a step: what it left is looked at. On every rank; a
        collective.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        local = [get_detached_local(parameter) for parameter in trained]
        norms = [
            torch.linalg.vector_norm(tensor, float("inf")) for tensor in local if tensor.numel()
        ]
        finite = not norms or bool(torch.isfinite(torch.stack(norms)).all())
        if self._world.any(not finite):
            self._diverged("weights that are not finite after the update")

    def _diverged(self, found: str) -> NoReturn:
        self._log.close("diverged")
        raise DivergedError(
            f"step {self.step}: found {found}, expected finite numbers; lower optimizer.lr "
            f"({self._cfg.optimizer.lr:g}) or clip_grad_norm, and resume=latest from a saved state"
        )

    def _validation_is_due(self) -> bool:
        if self._cfg.validation.source is None:
            return False
        every = self._cfg.validation.every_n_steps
        due = self.step % every == 0 if every else self._data.plan.locate(self.step)[1] == 0
        return due or self.step == self.total_steps


def _gather_peaks(own: Peaks, world: World) -> tuple[Peaks, dict[str, float]]:
    """Return the peaks of the rank that has reserved most, and by place in the pipeline what its
    ranks allocated at most, GiB.

    A collective of the host in a pipeline; without one the rank's own peaks, and nothing more.
    """
    if world.pipeline is None:
        return own, {}
    gathered: list[tuple[int, Peaks]] = world.gather_json([world.pipeline.rank, own])
    places: dict[str, float] = {}
    for place, peaks in gathered:
        name = f"peak_memory_allocated_gib_pipeline_{place}"
        places[name] = max(places.get(name, 0.0), convert_to_gib(peaks["allocated"]))
    return max((peaks for _, peaks in gathered), key=lambda peaks: peaks["reserved"]), places


class StopSignal:
    """Turns SIGTERM and SIGINT into a flag that all ranks agree on between two steps; a second
    SIGINT aborts at once.

    with StopSignal() as stop:
        for step in ...:
            train(step)
            if stop.agreed(world):
                save, and raise StoppedAndSaved

    The handler does nothing but set the flag, whatever the main thread is in the middle of. Leaving
    the block puts the former handlers back. To be entered in the main thread: Python delivers
    signals there only.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            return
        self.received = signal.Signals(number).name

    def agreed(self, world: World) -> bool:
        """True on every rank once a signal has reached any of them. A collective: all ranks call it
        after each step.

        One number goes over the host's process group, so the device's queue is not waited for.
        """
        return world.any(self.received is not None)


def compute_expert_load(
    model: nn.Module, world: World, cfg: "FullFinetuneConfig"
) -> dict[str, Tensor]:
    """Numbers of the step that ends, on the device: nothing for a model without experts, or with
    compiled layers. Of a pipeline all ranks have them, whatever their layers.

    `expert_load_max_over_mean`: tokens of the busiest expert over those of the average one, of the
    layer where that is most. `dropped_tokens`: choices that no expert computed. `router_aux_loss`:
    the mean over layers and micro-batches, where there is one. A collective.
    """
    mixture = getattr(getattr(model, "spec", None), "mixture", None)
    if mixture is None or cfg.compile:
        return {}
    mixtures = [
        (name, module) for name, module in model.named_modules() if isinstance(module, Mixture)
    ]
    loads = {name: module.load for name, module in mixtures if module.load is not None}
    rows = torch.zeros(
        len(mixture.layers), mixture.num_experts, dtype=torch.int64, device=world.device
    )
    others = torch.zeros(3, dtype=torch.float64, device=world.device)
    for name, load in loads.items():
        layer = next(
            part for part in name.split(".") if part.isdecimal()
        )  # of `model.layers.3.mlp` 3
        rows[int(layer)] = load.rows
        others += torch.stack(
            [
                _sum_over_tensor_ranks(load.loss, world),
                *load.loss.new_tensor([load.expected, load.calls]),
            ]
        )
        load.clear()
    world.sum_over_sequence(rows)
    world.sum_over_sequence(others[:2])  # each has as many calls
    rows, others = world.all_reduce_sum(rows), world.all_reduce_sum(others)
    used = rows[list(mixture.layers)].double()
    numbers = {
        "expert_load_max_over_mean": (used.amax(dim=1) / used.mean(dim=1).clamp(min=1e-9)).max(),
        "dropped_tokens": others[1] - rows.sum(),
    }
    if cfg.router_aux_loss_coef:
        numbers["router_aux_loss"] = others[0] / others[2].clamp(min=1)
    return numbers


def _sum_over_tensor_ranks(loss: Tensor, world: World) -> Tensor:
    """Of ranks that share tokens each knows a part of the loss. A collective of theirs."""
    if world.tensor is not None:
        loss = loss.clone()
        dist.all_reduce(loss, group=world.mesh["tensor"].get_group())
    return loss


# Resumable states of a run: model, optimizer and place in the data, saved and gone on from.


def resume_run(
    cfg: FullFinetuneConfig,
    model: nn.Module,
    optimizer: Optimizer,
    levers: OptimizerLevers,
    data: TrainingData,
    world: World,
) -> int:
    """Load the state that `resume` asks for into model and optimizer; return its step, 0 without
    one. Collective.

    Raises CheckpointError if there is none whole, if it is of another model, other data or another
    seed, or of a later step than this run's last.
    """
    root = Path(cfg.output_dir) / STATE_FOLDER
    found = find_state(root, cfg.resume, world) if cfg.resume else None
    if found is None:
        return 0
    done = read_manifest(found).step
    total = data.total_steps
    # A run that is as long as what is done trains nothing and exports; a shorter one would pass the
    # later weights off as those of its own last step.
    if done > total:
        raise CheckpointError(
            f"{found}: was saved after step {done}, found a run of {total} steps (epochs,"
            f" max_steps); set max_steps to {done} or more, or resume from an earlier state"
        )
    saved = load_state(found, model, optimizer, world, levers.place_state)
    set_hyperparameters(optimizer, cfg.optimizer)  # a changed config is what the run goes on with
    check_same_data(saved, data.identity(), found)
    data.best.restore(saved, found, world)
    get_logger().info("resume: %s, %d of %d steps done", found, saved["step"], data.total_steps)
    if saved["step"] == data.total_steps:
        what = "the model of that state" if data.best.folder is None else "the best step"
        get_logger().info("resume: no step is left to train; %s is exported", what)
    return saved["step"]


# How much of a step goes to communication: one step of a run is profiled on rank 0, the others are
# left alone.
#
# torch's profiler notes when each kernel of the device runs, NCCL's among them; on a CPU when
# operators and gloo's
# collectives do. From these times, each counted once however many run at a time:
#
#     communication_share          time in which a collective runs / time of the step
#     communication_exposed_share  time in which a collective runs and nothing is computed / time
# of the step
#     scaling_efficiency           1 - communication_exposed_share
#
# The last is the share of the step that would be left if all communication were hidden: what a
# rank does alone, as long
# as nothing else about the step changes. A collective runs from when rank 0 enters it, so that
# waiting for slower ranks
# is communication too. Copies between host and device are neither. The step that is profiled is a
# little slower than
# others; what the profiler takes before and after it is outside of the step's seconds. The part
# for CUDA has
# not run on a GPU (docs/measurements/on_a_gpu.md).

Spans = list[tuple[int, int]]  # beginning and end, ns

_COMMUNICATION = (
    "nccl",
    "gloo:",
)  # NCCL's kernels and annotations; gloo's collectives on its own threads
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_SILENT = ("KINETO_LOG_LEVEL", "99")  # kineto prints two lines for each profile otherwise
_OPERATORS = "aten::"  # of a CPU; what surrounds them (autograd's nodes, hooks) also waits


class CommunicationProbe:
    """Measures one step. Ranks other than the main one, a world of one rank and `step` None measure
    nothing.

    begin(step)   before each step
    end(seconds)  when the step is over, on the device too, or the run; the numbers, or none if it was not the step
    """

    def __init__(self, step: int | None, world: World) -> None:
        self._step = step if world.is_main and world.size > 1 else None
        self._device = world.device
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Starts the profiler if this is the step. What goes wrong with it is said, and nothing to
        the run.
        """
        if step != self._step:
            return
        if torch.autograd._profiler_enabled():
            _say_none("another profiler is at work")
            return
        os.environ.setdefault(*_SILENT)
        on_cpu = self._device.type == "cpu"
        device = None if on_cpu else self._device.type
        try:
            # What torch.profiler stands on: that would import the compiler first, for seconds.
            profiler = torch.autograd.profiler.profile(
                use_cpu=on_cpu, use_device=device, use_kineto=True
            )
            profiler.__enter__()
        except Exception as error:  # noqa: BLE001
            _say_none(get_first_line(error))
            return
        self._profiler = profiler

    def end(self, seconds: float) -> dict[str, float]:
        """Return the shares, see above. seconds: wall time of the step."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return {}
        try:
            profiler.__exit__(None, None, None)
            communication, computation = collect_spans(
                profiler.kineto_results.events(), self._device
            )
        except Exception as error:  # noqa: BLE001
            _say_none(get_first_line(error))
            return {}
        if not computation:  # no permission to look at the device, say
            _say_none("the profiler saw nothing run")
            return {}
        return compute_shares(communication, computation, seconds)


def collect_spans(events: Iterable[Any], device: torch.device) -> tuple[Spans, Spans]:
    """(of collectives, of computation), from kineto's events of a device; in no order."""
    communication: Spans = []
    computation: Spans = []
    on_cpu = device.type == "cpu"
    for event in events:
        name = event.name()
        if not on_cpu and (
            event.device_type() != torch.autograd.DeviceType.CUDA
            or event.device_index() != device.index
        ):
            continue
        is_computed = name.startswith(_OPERATORS)
        if not on_cpu:
            is_computed = not (name.startswith(_COPIES) or event.is_user_annotation())
        if not (is_computed or name.startswith(_COMMUNICATION)):
            continue
        into = communication if name.startswith(_COMMUNICATION) else computation
        into.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return communication, computation


def compute_shares(communication: Spans, computation: Spans, seconds: float) -> dict[str, float]:
    """Return the numbers above; seconds: of the step."""
    work = measure_covered(computation)
    exposed = measure_covered([*communication, *computation]) - work
    nanoseconds = max(seconds * 1e9, 1.0)
    found = {
        "communication_share": min(measure_covered(communication) / nanoseconds, 1.0),
        "communication_exposed_share": min(exposed / nanoseconds, 1.0),
    }
    return found | {"scaling_efficiency": 1.0 - found["communication_exposed_share"]}


def measure_covered(spans: Spans) -> int:
    """Return the time that any of the spans covers, ns."""
    covered = 0
    until = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def _say_none(reason: str) -> None:
    get_logger().info(
        f"communication: not measured ({reason}); log.communication_step=null leaves it out"
    )
