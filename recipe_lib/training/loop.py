"""Run the loop around a recipe's training step: record, validate, save, and end in order.

A recipe opens `TrainingLoop`, takes the batches of each step from `steps`, and hands what its
`train_step` returned to `finish`. Before that it calls `resume_run`, which loads a state: a folder
that an earlier process has saved to resume from. `CommunicationProbe` measures the share of
communication in one step.
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
from torch import nn
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
from recipe_lib.memory import PeakMemory, Peaks, explain_out_of_memory
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.optim.optimizers import OptimizerLevers, compute_learning_rate, keep_hyperparameters
from recipe_lib.parallel.heartbeat import FIRST_STEP_TIMEOUTS, STEP_TIMEOUTS
from recipe_lib.parallel.world import World
from recipe_lib.report.phases import phase
from recipe_lib.training.output import check_same_data
from recipe_lib.training.records import build_step_metrics, compute_expert_load
from recipe_lib.training.run import check_same_batches
from recipe_lib.training.run_log import STOPPED_EARLY, RunLog, count_data
from recipe_lib.training.training_data import TrainingData
from recipe_lib.units import convert_to_gib


@dataclass
class Step:
    """The results of an optimizer step: tensors of one element, each on the device or the host."""

    loss: torch.Tensor  # mean loss of the step over all ranks
    grad_norm: torch.Tensor  # L2 norm of the gradient of all parameters, before clipping
    # Further numbers that the recipe logs, by name; the same on every rank
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)

    def read_numbers(self) -> tuple[float, float, dict[str, float]]:
        """Return (loss, norm of the gradient, metrics) on the host."""
        tensors = [self.loss, self.grad_norm, *self.metrics.values()]
        # Copied as one tensor, so that the host waits for the device once.
        on_device = [
            tensor.to(torch.float64).reshape(())
            for tensor in tensors
            if tensor.device.type != "cpu"
        ]
        copied = iter(torch.stack(on_device).cpu() if on_device else ())
        loss, norm, *metrics = (
            float(tensor if tensor.device.type == "cpu" else next(copied)) for tensor in tensors
        )
        return loss, norm, dict(zip(self.metrics, metrics, strict=True))


def build_lr_schedule(cfg: FullFinetuneConfig, total_steps: int) -> Callable[[int], float]:
    """Return `fn(step)`, the learning rate of a step by its index, from 0.

    total_steps: of the whole run.
    """
    return partial(
        compute_learning_rate, cfg.lr_scheduler, cfg.optimizer.lr, total_steps=total_steps
    )


class TrainingLoop:
    """The steps of a run, one after the other; every rank makes the same calls.

    with TrainingLoop(cfg, world, model, optimizer, data, done=step) as loop:
        for batches in loop.steps():
            learning_rate = schedule(loop.step)
            set_learning_rate(optimizer, learning_rate)
            step = train_step(batches)
            loop.finish(step, batches, learning_rate=learning_rate, validate=validate)

    An out-of-memory error inside the block becomes one line, with the config keys that save memory
    and are not yet used.
    """

    step: int  # number of optimizer steps done, those before a resume included
    total_steps: int  # number of optimizer steps of the whole run

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
        """Take the parts of a run. done: number of steps that earlier processes have trained.

        Raises ConfigError if quantization-aware training would begin after the last step.
        """
        self.step = done
        self.total_steps = data.total_steps
        self._cfg = cfg
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._data = data
        self._peak = PeakMemory(world.device)
        self._probe = CommunicationProbe(cfg.log.communication_step, world)
        if cfg.qat is not None and cfg.qat_start_step >= self.total_steps:
            raise ConfigError(
                f"qat_start_step: found {cfg.qat_start_step} for a run of {self.total_steps} steps,"
                f" none of which would train in {cfg.qat}; choose less, or remove qat"
            )
        self._began = 0.0  # time.perf_counter() when the step began, seconds
        self._compilation = ExitStack()  # shows that the first step compiles, while it runs
        self._has_warned_of_zero = False  # True: a gradient of exactly 0 has been warned of

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(explain_out_of_memory("training", self._cfg, self._peak))
            # Adds to an error the pipeline action that the rank was at. The pipeline's generator
            # cannot: an error in the recipe's loop over micro-batches is not raised inside of it.
            # Entered after `explain_out_of_memory`, which quotes the action in its own error.
            stack.enter_context(self._world.heartbeat.name_action_in_errors())
            self._log = stack.enter_context(
                RunLog(
                    self._cfg,
                    self._world,
                    self.total_steps,
                    done=self.step,
                    data=count_data(self._data),
                )
            )
            self._stop = stack.enter_context(StopSignal())
            stack.enter_context(self._compilation)
            # If a context had raised, the `with` would have left those before it. From here on
            # `__exit__` leaves them all.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        self._probe.end(0.0)  # stops the profiler of a step that was not finished
        self._world.heartbeat.is_ending = exception[0] is not None
        if exception[0] is None:
            best = self._data.best
            is_early = self.step < self.total_steps and best.is_waited_out
            self._log.close(
                STOPPED_EARLY if is_early else "done", best.list_facts(self.total_steps)
            )
        return self._stack.__exit__(*exception)

    def steps(self) -> Iterator[StepBatches]:
        """Yield the batches of each step that is left; the caller ends a step by `finish`.

        After the last one, with `checkpoint.keep_best`, the weights of the best step are loaded
        into the model.
        """
        first_step = self.step
        source = self._data.batches(first_step)
        while not self._is_over():
            # The first step creates communicators and compiles kernels, so it may take longer.
            is_first = self.step == first_step
            self._world.heartbeat.enter(
                f"step {self.step + 1}", FIRST_STEP_TIMEOUTS if is_first else STEP_TIMEOUTS
            )
            self._probe.begin(self.step + 1)
            self._began = time.perf_counter()
            self._peak.reset()
            batches = replace(next(source), step=self.step)
            if is_first:
                check_same_batches(batches, self._world)
            if is_first and self._cfg.compile:
                self._compilation.enter_context(phase("first step, which compiles the layers"))
            yield batches
            del batches  # would hold memory while the next step's are made
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
        """Record a step, then validate and save if that is due. Collective.

        learning_rate: of this step, for the log. validate: runs a validation and returns its
        numbers by name, of which `checkpoint.best_metric` decides the best step. It is called each
        `validation.every_n_steps` steps (None: at the end of each epoch), and after the last.

        Raise DivergedError if loss or gradient are not finite, or weights that would be saved or
        exported. Raise StoppedAndSaved, after saving, once any rank has received a signal to stop.
        """
        heartbeat = self._world.heartbeat
        self._record(step, batches, learning_rate)
        if self._is_validation_due():
            heartbeat.enter(f"validation after step {self.step}")
            with phase("validating"):
                numbers = dict(validate())
            self._log.record_validation({"step": self.step} | numbers)
            self._judge(numbers)
            heartbeat.enter(f"end of step {self.step}")
        stopped = self._stop.agree(self._world)
        is_last = self._is_over()
        interval = self._cfg.checkpoint.save_every_n_steps
        is_save_due = stopped or (interval is not None and (self.step % interval == 0 or is_last))
        if is_save_due or is_last:
            self._check_weights()
        if is_save_due:
            heartbeat.enter(f"saving step {self.step}")
            with phase("saving a state to resume from"):
                path = save_state(
                    Path(self._cfg.output_dir) / STATE_FOLDER,
                    self.step,
                    self._model,
                    optimizer=self._optimizer,
                    extra={
                        "step": self.step,
                        **self._data.identity(),
                        BEST_RECORD: self._data.best.make_record(),
                    },
                    world=self._world,
                    keep=self._cfg.checkpoint.keep_last_n,
                )
                # Removes weights of earlier best steps, now that the new state is complete. The
                # state before it may name them, and would be resumed from if saving had failed.
                self._data.best.prune(self._world)
        if stopped:
            self._log.close("stopped")
            raise StoppedAndSaved(
                f"stopped after step {self.step}; resume it with resume=latest ({path})"
            )

    def _record(self, step: Step, batches: StepBatches, lr: float) -> None:
        """Wait for the step and write its line of metrics. Collective.

        Raise DivergedError if loss or gradient norm are not finite.
        """
        step.metrics |= compute_expert_load(self._model, self._world, self._cfg)
        loss, grad_norm, metrics = step.read_numbers()  # the one place that waits for the device
        self._compilation.close()
        seconds = time.perf_counter() - self._began
        self.step += 1
        self._world.heartbeat.enter(f"recording step {self.step}")
        peak, stage_peaks = _gather_peaks(self._peak.read(), self._world)
        shares = self._probe.end(seconds)  # of communication; empty but for one step
        epoch, steps = self._data.plan.locate(self.step)
        line = build_step_metrics(
            step=self.step,
            epoch=epoch + steps / self._data.plan.count_steps(epoch),
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            label_tokens=batches.num_label_tokens,
            total_tokens=batches.total_tokens,
            devices=self._world.size,
            peak=peak,
        )
        self._log.record_step(line | stage_peaks | shares | metrics, tuple(metrics))
        if shares:
            get_logger().info(
                f"step {self.step}: {shares['communication_share']:.1%} of its time in"
                f" communication, {shares['communication_exposed_share']:.1%} not hidden by"
                f" computation; scaling efficiency {shares['scaling_efficiency']:.1%} (1 - what is"
                " not hidden)"
            )
        if grad_norm == 0.0 and batches.num_label_tokens and not self._has_warned_of_zero:
            self._has_warned_of_zero = True
            get_logger().warning(
                "warning: step %d: the gradient is exactly 0, so nothing is learned; look for"
                " damaged weights, or a frozen model",
                self.step,
            )
        if not (abs(loss) < float("inf") and abs(grad_norm) < float("inf")):
            self._raise_diverged(f"loss {loss} and grad_norm {grad_norm}")

    def _judge(self, numbers: Mapping[str, float]) -> None:
        """Compare a validation with the best so far, and save the weights of a better step.

        They are saved only with `checkpoint.keep_best`. numbers: of the validation, by name.
        """
        best = self._data.best
        if best.is_asked_for and best.judge(self.step, numbers, self._world) and best.keeps_weights:
            self._check_weights()
            self._world.heartbeat.enter(f"keeping the best step {self.step}")
            with phase("keeping the weights of the best step"):
                best.save_weights(self.step, self._model, self._world)

    def _check_weights(self) -> None:
        """Raise DivergedError if trained weights are not finite. Collective."""
        # No loss or gradient after the last update would show that it was not finite.
        shards = [
            get_detached_local(parameter)
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        norms = [torch.linalg.vector_norm(shard, float("inf")) for shard in shards if shard.numel()]
        # Streamed layers are in host memory, the rest on the device, for which the host waits once.
        devices = {norm.device for norm in norms}
        is_finite = all(
            torch.isfinite(torch.stack([norm for norm in norms if norm.device == device])).all()
            for device in devices
        )
        if self._world.any(not is_finite):
            self._raise_diverged("weights that are not finite after the update")

    def _raise_diverged(self, found: str) -> NoReturn:
        """Close the log and raise DivergedError. found: what is not finite, for the error line."""
        self._log.close("diverged")
        raise DivergedError(
            f"step {self.step}: found {found}, expected finite numbers; lower optimizer.lr "
            f"({self._cfg.optimizer.lr:g}) or clip_grad_norm, and resume=latest from a saved state"
        )

    def _is_validation_due(self) -> bool:
        if self._cfg.validation.source is None:
            return False
        interval = self._cfg.validation.every_n_steps
        _, steps_of_epoch = self._data.plan.locate(self.step)
        is_due = self.step % interval == 0 if interval else steps_of_epoch == 0
        return is_due or self.step == self.total_steps


def _gather_peaks(local_peaks: Peaks, world: World) -> tuple[Peaks, dict[str, float]]:
    """Return (peaks of the rank that has reserved most, metrics of the pipeline's ranks).

    The metrics are name -> the most GiB allocated at one place in the pipeline. Collective, over
    the host's process group. Without a pipeline nothing is gathered: the local peaks are returned,
    and an empty dict.
    """
    if world.pipeline is None:
        return local_peaks, {}
    gathered: list[tuple[int, Peaks]] = world.gather_json([world.pipeline.rank, local_peaks])
    stage_peaks: dict[str, float] = {}
    for pipeline_rank, peaks in gathered:
        name = f"peak_memory_allocated_gib_pipeline_{pipeline_rank}"
        stage_peaks[name] = max(stage_peaks.get(name, 0.0), convert_to_gib(peaks["allocated"]))
    return max((peaks for _, peaks in gathered), key=lambda peaks: peaks["reserved"]), stage_peaks


class StopSignal:
    """A flag for SIGTERM and SIGINT that ranks agree on between two steps; a second SIGINT aborts.

    with StopSignal() as stop:
        for step in ...:
            train(step)
            if stop.agree(world):
                save, and raise StoppedAndSaved

    Leaving the block puts the former handlers back. To be entered in the main thread: Python
    delivers signals there only.
    """

    received: str | None = None  # name of the signal that this process has received

    def __enter__(self) -> Self:
        # signal -> the handler to put back
        self._former_handlers = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            # Ended by the signal itself, so that the parent process sees how it ended.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            return
        # Sets the flag alone: the main thread may be in the middle of anything.
        self.received = signal.Signals(number).name

    def agree(self, world: World) -> bool:
        """Return True on every rank once a signal has reached any of them. Collective."""
        # One number over the host's process group, so that nobody waits for the device.
        return world.any(self.received is not None)


def resume_run(
    cfg: FullFinetuneConfig,
    model: nn.Module,
    optimizer: Optimizer,
    levers: OptimizerLevers,
    data: TrainingData,
    world: World,
) -> int:
    """Load the state that `resume` names into model and optimizer; return its step. Collective.

    Returns 0 if `resume` is not set or finds no state. levers: the result of
    `apply_optimizer_levers`; it puts loaded optimizer states where they belong, on the host or the
    device. Raise CheckpointError if the state is not complete, is of another model, data or seed,
    or of a later step than this run's last.
    """
    states = Path(cfg.output_dir) / STATE_FOLDER
    state = find_state(states, cfg.resume, world) if cfg.resume else None
    if state is None:
        return 0
    done = read_manifest(state).step
    # With done == total_steps nothing is trained, and the model is exported. A shorter run would
    # export weights of a later step as those of its last.
    if done > data.total_steps:
        raise CheckpointError(
            f"{state}: was saved after step {done}, found a run of {data.total_steps} steps"
            f" (epochs, max_steps); set max_steps to {done} or more, or resume from an earlier"
            " state"
        )
    # The state has the hyperparameters of the earlier run; those of this run count.
    with keep_hyperparameters(optimizer, cfg.optimizer):
        saved = load_state(
            state, model=model, optimizer=optimizer, world=world, place_state=levers.place_state
        )
    check_same_data(saved, data.identity(), state)
    data.best.restore(saved, state, world)
    get_logger().info("resume: %s, %d of %d steps done", state, saved["step"], data.total_steps)
    if saved["step"] == data.total_steps:
        exported = "the model of that state" if data.best.folder is None else "the best step"
        get_logger().info("resume: no step is left to train; %s is exported", exported)
    return saved["step"]


# The share of communication in a step. One step of a run is profiled, on rank 0; no other step is
# slowed down.
#
# torch's profiler notes when each kernel of the device runs, NCCL's among them; on a CPU when
# operators and gloo's collectives run. Overlapping times count once:
#
#     communication_share          time in which a collective runs / time of the step
#     communication_exposed_share  time in which one runs and nothing is computed / the same
#     scaling_efficiency           1 - communication_exposed_share
#
# The last is the share of the step's time that would be left if all communication were hidden and
# nothing else about the step changed. A collective runs from when rank 0 enters it, so waiting for
# slower ranks counts as communication. Copies between host and device are neither communication nor
# computation. The part for CUDA has not run on a GPU (docs/measurements/on_a_gpu.md).

Spans = list[tuple[int, int]]  # (beginning, end) of events, ns

# Beginnings of the names of profiler events: NCCL's kernels and annotations, gloo's collectives
_COMMUNICATION = ("nccl", "gloo:")
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # between host and device
# Beginning of the names of operators. On a CPU they alone count as computation: the events around
# them (autograd's nodes, hooks) include waiting.
_OPERATORS = "aten::"
# Environment variable and value; without it kineto prints two lines for each profile
_SILENT = ("KINETO_LOG_LEVEL", "99")


class CommunicationProbe:
    """The measurement of communication in one step of rank 0; of nothing where it is alone.

    `TrainingLoop` calls `begin` before each step, and `end` when it is over on the device too.
    """

    def __init__(self, step: int | None, world: World) -> None:
        """Choose the step to measure, counted from 1; None: none."""
        self._step = step if world.is_main and world.size > 1 else None
        self._device = world.device
        self._profiler: Any = None  # torch's, while the step runs

    def begin(self, step: int) -> None:
        if step != self._step:
            return
        if torch.autograd._profiler_enabled():
            _log_not_measured("another profiler is at work")
            return
        os.environ.setdefault(*_SILENT)
        on_cpu = self._device.type == "cpu"
        try:
            # Not torch.profiler, which is built on this: it imports the compiler, which takes
            # seconds.
            self._profiler = torch.autograd.profiler.profile(
                use_cpu=on_cpu, use_device=None if on_cpu else self._device.type, use_kineto=True
            ).__enter__()
        except Exception as error:  # noqa: BLE001 - a figure is not worth a run
            _log_not_measured(get_first_line(error))

    def end(self, seconds: float) -> dict[str, float]:
        """Stop the profiler and return the shares by name; empty: nothing was measured.

        seconds: wall time of the step.
        """
        profiler = self._profiler
        if profiler is None:
            return {}
        self._profiler = None
        try:
            profiler.__exit__(None, None, None)
            communication, computation = collect_spans(
                profiler.kineto_results.events(), self._device
            )
        except Exception as error:  # noqa: BLE001 - as in `begin`
            _log_not_measured(get_first_line(error))
            return {}
        if not computation:  # for example if the profiler may not read the device's counters
            _log_not_measured("the profiler saw nothing run")
            return {}
        return compute_shares(communication, computation, seconds)


def collect_spans(events: Iterable[Any], device: torch.device) -> tuple[Spans, Spans]:
    """Return (spans of collectives, spans of computation), unordered.

    events: those of a kineto profile. Events of other devices are left out.
    """
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
        is_computed = (
            name.startswith(_OPERATORS)
            if on_cpu
            else not (name.startswith(_COPIES) or event.is_user_annotation())
        )
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if name.startswith(_COMMUNICATION):
            communication.append(span)
        elif is_computed:
            computation.append(span)
    return communication, computation


def compute_shares(communication: Spans, computation: Spans, seconds: float) -> dict[str, float]:
    """Return the shares by name, each between 0 and 1. seconds: wall time of the step."""
    exposed = measure_covered([*communication, *computation]) - measure_covered(computation)
    nanoseconds = max(seconds * 1e9, 1.0)
    exposed_share = min(exposed / nanoseconds, 1.0)
    return {
        "communication_share": min(measure_covered(communication) / nanoseconds, 1.0),
        "communication_exposed_share": exposed_share,
        "scaling_efficiency": 1.0 - exposed_share,
    }


def measure_covered(spans: Spans) -> int:
    """Return the time that any of the spans covers, ns."""
    covered = 0
    until = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def _log_not_measured(reason: str) -> None:
    get_logger().info(
        f"communication: not measured ({reason}); log.communication_step=null leaves it out"
    )
