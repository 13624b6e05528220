"""Build the datasets of a config: tokenize its sources in parallel, or map them from the cache.

A run calls `build_datasets` before it has a process group or a device context, because it forks.
`build_dataset` builds one dataset. The lower half is a pool of forks: `map_in_order` runs a
function on many pieces and yields the results in order. An item of a dataset is a sequence, or a
pair of two.
"""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from recipe_lib.config.local_files import get_cache_root
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, SourceConfig
from recipe_lib.config.schema_data import list_sources_by_section, resolve_validation_source
from recipe_lib.data.cache import ArrayWriter, compute_cache_key, load_or_make
from recipe_lib.data.dataset import Dataset, Origin, find_copies
from recipe_lib.data.dataset_report import MOST_BAD_LINES, PLACES, DataReport
from recipe_lib.data.encoding import Chunk, SourceEncoder, Task
from recipe_lib.data.find_format import fill_in_format
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import get_columns_section
from recipe_lib.data.sources import SampleFile, open_sources
from recipe_lib.errors import DataError, SetupError
from recipe_lib.report.phases import phase
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.units import MIB

SAMPLES_PER_TASK = 256  # samples that a worker tokenizes at a time
# Bytes of the sources for each process; for less, starting one takes longer than it saves
BYTES_PER_WORKER = 2**20

# (dataset of training, dataset of validation or None)
PreparedData = tuple[Dataset, Dataset | None]


def build_dataset(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    max_seq_len: int,
    *,
    validation: SourceConfig | None = None,
    may_be_empty: bool = False,
) -> Dataset:
    """Return all samples of all sources, tokenized; out of the cache if they are there.

    max_seq_len: tokens that a sequence has at most. validation: a source that is read in place of
    those in `cfg`; None: read those. may_be_empty: accept a source of which no sample is left; the
    cache is not used then. Raises DataError for a missing file, a bad or too long sample where
    `cfg` makes these errors, no sample that trains anything, or (with `check_label_mask`) a source
    of which no token or every token is trained.
    """
    return DatasetBuilder(
        cfg, tokenizer, max_seq_len=max_seq_len, validation=validation, may_be_empty=may_be_empty
    ).build()


def build_validation_dataset(
    cfg: FullFinetuneConfig, tokenizer: Tokenizer, may_be_empty: bool = False
) -> Dataset | None:
    """Return the dataset of `validation.source`; None if it is not set.

    may_be_empty: accept a source of which no sample is left. Raises DataError as `build_dataset`
    does.
    """
    source = resolve_validation_source(cfg.data, cfg.validation)
    if source is None:
        return None
    return build_dataset(
        cfg.data, tokenizer, cfg.max_seq_len, validation=source, may_be_empty=may_be_empty
    )


def build_datasets(
    cfg: FullFinetuneConfig, tokenizer: Tokenizer, may_be_empty: bool = False
) -> PreparedData:
    """Return the datasets of training and of `validation.source` (None if that is not set).

    may_be_empty: accept a source of which no sample is left. Works with `data.num_proc` processes,
    or with one once there is a process group or a device context. With a cache one of a machine's
    ranks does the work, and the others map its files. Raises DataError with the faults of both
    datasets, for what `build_dataset` does.
    """
    training: Dataset | None = None
    validation: Dataset | None = None
    faults = list[str]()
    try:
        training = build_dataset(cfg.data, tokenizer, cfg.max_seq_len, may_be_empty=may_be_empty)
    except DataError as error:
        faults += error.faults
    try:
        validation = build_validation_dataset(cfg, tokenizer, may_be_empty)
    except DataError as error:
        # The same faults of both, such as of a setting that both have, are told once.
        faults += [] if list(error.faults) == faults else error.faults
    if faults:
        raise DataError(*faults)
    assert training is not None
    return training, validation


class DatasetBuilder:
    """A builder of one dataset, which may be in the cache."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: Tokenizer,
        max_seq_len: int,
        validation: SourceConfig | None = None,
        may_be_empty: bool = False,
    ) -> None:
        """Look up the files of the sources, and with `format: auto` read their first samples.

        validation, may_be_empty: as for `build_dataset`. Raises DataError for no source, a missing
        file, samples of no format, or settings that the tokenizer does not allow.
        """
        sources = (
            {"validation": validation} if validation is not None else list_sources_by_section(cfg)
        )
        if not sources:
            raise DataError(
                "data.source: is not set; set it to a file or folder of samples, or to"
                " hub:OWNER/NAME"
            )
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.may_be_empty = may_be_empty
        files_of_sources = [
            open_sources(
                source,
                sample_limit=int(cfg.max_sample_mib * MIB),
                cache=get_cache_root(cfg.cache_dir),
                section=section,
            )
            for section, source in sources.items()
        ]
        for (section, source), files in zip(list(sources.items()), files_of_sources, strict=True):
            sources[section] = fill_in_format(
                source,
                files,
                section=get_columns_section(section),
                ignored=cfg.ignore_columns,
            )
        self.sources = list(sources.values())  # in the order of the config, with their formats
        self.encoder = Encoder(
            tokenizer,
            template=cfg.template,
            train_on=cfg.train_on,
            add_bos=cfg.add_bos,
            history=cfg.history,
            add_eos=cfg.add_eos,
            parse_special_tokens=cfg.parse_special_tokens,
        )
        self.encoders = [  # one for each source
            SourceEncoder(cfg, source, self.encoder, max_seq_len=max_seq_len, section=section)
            for section, source in sources.items()
        ]
        self.files = list[SampleFile]()  # of all sources, in order
        self.source_of_file = list[int]()  # for each file the index of its source
        for index, files in enumerate(files_of_sources):
            self.files += files
            self.source_of_file += [index] * len(files)

    def find_key(self) -> str | None:
        """Return the name that the dataset has in the cache; None: it is not cached."""
        if not self.cfg.cache or self.may_be_empty:  # a run could not use an empty one
            return None
        cfg = self.cfg
        # These decide which samples are read and how. The dataset's fingerprint needs none of them,
        # as it is made of the result; the key is needed before there is a result.
        reading = {
            "max_sample_mib": cfg.max_sample_mib,
            "history": cfg.history,
            "ignore_columns": cfg.ignore_columns,
        }
        return compute_cache_key(
            self._list_settings() | reading,
            self.files,
            encoders=self.encoders,
            tokenizer=self.tokenizer,
        )

    def build(self) -> Dataset:
        """Return the dataset: from the cache, or tokenized now.

        Raises DataError for bad samples where the config makes these errors, for a source that
        trains nothing, or (with `check_label_mask`) one that trains no token or every one.
        """
        stored = load_or_make(get_cache_root(self.cfg.cache_dir), self.find_key(), self._make)
        arrays = stored.arrays
        if self.cfg.check_label_mask:
            stored.report.check_share()
        return Dataset(
            arrays["ids"],
            arrays["offsets"],
            arrays["trained"],
            report=stored.report,
            settings=self._list_settings(),
            group=2 if stored.report.pairs else 1,
            # For each item the index of its source
            source_of=np.array(self.source_of_file, dtype=np.int16)[arrays["file_of"]],
            weights=[source.weight for source in self.sources],
            origin=self._make_origin(arrays),
            checksums=stored.checksums,
            values=arrays["values"],
        )

    def _list_settings(self) -> dict[str, Any]:
        """Return the settings that decide the tokens, which enter the dataset's fingerprint."""
        cfg = self.cfg
        # Key -> (value, default). At the default they are left out, so that the fingerprint stays
        # that of versions without these keys, whose runs can then be resumed.
        newer_keys = {
            "add_eos": (cfg.add_eos, True),
            "parse_special_tokens": (cfg.parse_special_tokens, None),
        }
        return {
            name: value for name, (value, default) in newer_keys.items() if value != default
        } | {
            "formats": [encoder.format for encoder in self.encoders],
            "template": self.encoder.template,
            "train_on": cfg.train_on,
            "add_bos": self.encoder.add_bos,
            "max_seq_len": self.max_seq_len,
            "max_samples": [source.max_samples for source in self.sources],
            "on_invalid": cfg.on_invalid,
            "truncation": cfg.truncation,
            "vocab_size": self.tokenizer.vocab_size,
        }

    def _make(self, writer: ArrayWriter) -> DataReport:
        """Tokenize all samples into the writer's arrays, and return the report.

        Raises DataError with the bad samples of all sources, if `data.on_invalid` is `error`. A
        fault of a whole file ends the reading, and is the last of them.
        """
        reports = [encoder.build_report() for encoder in self.encoders]
        tasks = self._split_tasks()
        num_samples = sum((task.stop or 0) - task.start for task in tasks)
        # Without a folder in the cache each rank of this machine tokenizes for itself, in memory,
        # and they share its cores.
        shared_by = 1 if writer.folder else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_workers = min(
            count_workers(self.cfg.num_proc, shared_by),
            1 + sum(map(_estimate_bytes, self.files)) // BYTES_PER_WORKER,
        )
        with (
            phase("data: tokenizing", num_samples, "samples") as progress,
            closing(map_in_order(self._encode, tasks, num_workers)) as chunks,
        ):
            for task, chunk in zip(tasks, chunks, strict=True):
                if chunk.fault is not None:  # a file cannot be read any further
                    bad_lines = list[str]()
                    if self.cfg.on_invalid == "error":
                        for source_report in reports:
                            bad_lines += [
                                line for _, line in source_report.bad_lines[:MOST_BAD_LINES]
                            ]
                    raise DataError(*bad_lines, *chunk.fault.faults) if bad_lines else chunk.fault
                reports[task.source].add(chunk.report)
                writer.append(chunk, task.file)
                progress.advance(chunk.report.samples_read)
        faults = [line for source_report in reports for line in self._list_faults(source_report)]
        if faults:
            raise DataError(*faults)
        report = self._sum_reports(reports)
        if report.pairs not in (0, writer.items):
            raise DataError(
                f"{report.source}: found {report.pairs} preference pairs among {writer.items}"
                " items, expected pairs alone or none; give all sources the same kind of format"
            )
        for count, noun in ((report.labels, "true or false"), (report.classified, "a class")):
            if count and count != report.samples_read - sum(report.bad_samples.values()):
                raise DataError(
                    f"{report.source}: found samples with {noun} as label among others, expected"
                    " such alone or none; give all sources the same kind of format"
                )
        report.classes = list(writer.classes)
        self._count_copies(report, writer)
        return report

    def _list_faults(self, part: DataReport) -> list[str]:
        """Return the faults of one source; empty: it has none.

        They are its bad samples, where `data.on_invalid` makes these errors. Else the only fault
        is that nothing is left to train on, unless that is allowed.
        """
        if part.bad_samples and self.cfg.on_invalid == "error":
            return part.list_sample_faults()
        fault = None if self.may_be_empty else part.why_nothing_left()
        return [fault] if fault else []

    def _split_tasks(self) -> list[Task]:
        """Split all samples into tasks, in order and the same for any number of workers."""
        tasks: list[Task] = []
        # For each source the samples that may still be taken; None: no limit
        samples_left = [source.max_samples for source in self.sources]
        for number, file in enumerate(self.files):
            source = self.source_of_file[number]
            max_samples = samples_left[source]
            if max_samples == 0:
                continue
            try:
                num_samples = len(file) if max_samples is None else min(len(file), max_samples)
            except DataError:
                # A worker raises it again, after the faults of the samples before this file.
                return [*tasks, Task(source, number, start=0, stop=None)]
            samples_left[source] = None if max_samples is None else max_samples - num_samples
            tasks += [
                Task(source, number, start=start, stop=min(start + SAMPLES_PER_TASK, num_samples))
                for start in range(0, num_samples, SAMPLES_PER_TASK)
            ]
        return tasks

    def _encode(self, task: Task) -> Chunk:
        return self.encoders[task.source].encode(self.files[task.file], task.start, task.stop)

    def _sum_reports(self, reports: Sequence[DataReport]) -> DataReport:
        if len(reports) == 1:
            return reports[0]
        total = self.encoders[0].build_report()
        total.source = ", ".join(report.source for report in reports)
        total.format = ", ".join(dict.fromkeys(report.format for report in reports))
        total.parts = list(reports)
        for report in reports:
            total.add(report)
        return total

    def _make_origin(self, arrays: Mapping[str, np.ndarray]) -> Origin:
        return Origin(
            files=self.files,
            file_of=arrays["file_of"],
            sample_of=arrays["sample_of"],
            digests=arrays["digests"],
        )

    def _count_copies(self, report: DataReport, writer: ArrayWriter) -> None:
        """Count items that are the same as an earlier one, and name the first of them."""
        writer.sync()
        arrays = writer.get_arrays()
        copies, originals = find_copies(arrays["digests"])
        report.duplicate_sequences = len(copies)
        origin = self._make_origin(arrays)
        pairs = zip(copies[:PLACES].tolist(), originals[:PLACES].tolist(), strict=True)
        report.duplicates += [[origin.locate_item(item) for item in pair] for pair in pairs]


def _estimate_bytes(file: SampleFile) -> int:
    """Return the bytes of a local file; for a hub dataset 1 TiB, which allows all workers."""
    path = Path(file.place)
    return path.stat().st_size if path.is_file() else 2**40


Piece = TypeVar("Piece")
Result = TypeVar("Result")

PIECES_AHEAD = 4  # pieces for each process that may be done before the first of them is taken

# The function that a worker runs, set in each fork: as an argument it would be pickled with every
# piece
_work: Callable[[Any], Any] | None = None


def count_workers(num_proc: int | None, shared_by: int = 1) -> int:
    """Return how many processes to work with.

    num_proc: `data.num_proc`, for the machine; None: one for each core. shared_by: number of ranks
    of the machine that do this at once, and share the processes.
    """
    # A fork lacks the threads of a process group or of a device, so it is not safe beside them. A
    # daemonic process may have no children.
    has_group = dist.is_available() and dist.is_initialized()
    if has_group or torch.cuda.is_initialized() or multiprocessing.current_process().daemon:
        return 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, (num_proc or cores) // shared_by)


def has_dead_groups() -> bool:
    """Return True if an earlier run has left threads of its process group in this process."""
    if not dist.is_available() or dist.is_initialized():
        return False
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            names.append(file.read_text())
    return any("gloo" in name for name in names)


def map_in_order(
    work: Callable[[Piece], Result], pieces: Sequence[Piece], workers: int
) -> Generator[Result, None, None]:
    """Yield `work` of each piece, in the order of the pieces, by forks of this process.

    workers: number of forks; 1: this process does the work. Pieces and results are pickled, `work`
    is not. Raises SetupError if a worker is killed, and what `work` raises.
    """
    workers = min(workers, len(pieces))
    if workers <= 1:
        yield from map(work, pieces)
        return
    futures: deque[Future[Result]] = deque()
    try:
        with start_forks(work, workers) as submit:
            for piece in pieces:
                futures.append(submit(piece))
                if len(futures) >= PIECES_AHEAD * workers:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
    except BrokenProcessPool:
        raise SetupError(
            f"data.num_proc: one of {workers} processes that tokenize was killed (out of memory?);"
            " lower data.num_proc"
        ) from None


@contextmanager
def start_forks(
    work: Callable[[Piece], Result], workers: int
) -> Iterator[Callable[[Piece], Future[Result]]]:
    """Start `workers` forks of this process, and yield a function that submits a piece to them.

    Pieces and results are pickled, `work` is not. Futures raise BrokenProcessPool if a fork was
    killed.
    """
    # Collect the process group that an earlier run has left, before the fork: a fork that drops its
    # last reference crashes or hangs (docs/upstream/gloo_group_in_fork.md).
    if has_dead_groups():
        gc.unfreeze()  # frozen objects would not be collected
        gc.collect()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(work,)
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread at a fork; the threads of this process hold no lock that a
        # worker takes.
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        try:
            yield lambda piece: pool.submit(_run_piece, piece)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(work: Callable[[Any], Any]) -> None:
    """Prepare a fork for `work`: its garbage, its signals, and its end with the parent."""
    global _work
    _work = work
    gc.freeze()  # the fork must not finalize objects that belong to the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not come along in the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process once its parent is gone, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # at once: nobody is left to read a result


def _run_piece(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
