"""A teacher's likeliest tokens on the disk, as `tune teach` writes them: which data they are of, and those of a batch.

A folder holds `teacher.json` and for the training and the validation sequences shards `train-00000.safetensors`, ...,
of so many sequences each. A shard has, of its sequences' labels in their order, `ids` int32 `[n, k]`, `log_probs`
`[n, k]` and `rest` fp32 `[n]`, the log of what is left for all other ids. A shard has its name when it is whole.
"""

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from recipe_lib.checkpoint.tensor_files import DTYPE_NAMES, PlannedTensor, read_header, write_tensor_file
from recipe_lib.config.recipes.distill_distributed import DistillFinetuneConfig
from recipe_lib.config.suggest import show
from recipe_lib.data import Batch, Dataset
from recipe_lib.errors import CheckpointError, ConfigError, DataError
from recipe_lib.files import write_aside
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.distillation import TopTokens
from recipe_lib.ops.fused_loss import IGNORED
from recipe_lib.ops.sequence_shards import own_tokens
from recipe_lib.reading import read_object

if TYPE_CHECKING:
    from recipe_lib.parallel.world import World

MANIFEST = "teacher.json"
TRAIN, VALIDATION = "train", "validation"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_OPEN_SHARDS = 16


@dataclass(frozen=True)
class TaughtFacts:
    """What all shards of a folder have in common. vocabulary: ids that the k likeliest are chosen of. data: fingerprint
    of the tokenized sequences by `train` and `validation`. shard_sequences: of each shard but the last."""

    teacher: str
    top_k: int
    temperature: float
    vocabulary: int
    dtype: str
    shard_sequences: int
    data: dict[str, str] = field(default_factory=dict)


class TaughtTokens:
    """A folder of a teacher's likeliest tokens. name: what errors call it, a key or an option."""

    def __init__(self, folder: Path, facts: TaughtFacts, name: str = "distill.from_disk") -> None:
        self.folder, self.facts, self.name = folder, facts, name
        self._parts: dict[str, tuple[Dataset, np.ndarray]] = {}
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def check(self, train: Dataset, validation: Dataset | None) -> None:
        """DataError unless they are of these sequences, and whole."""
        for part, dataset in ((TRAIN, train), (VALIDATION, validation)):
            if dataset is None:
                continue
            found = self.facts.data.get(part)
            if found is None:
                raise DataError(
                    f"{self.name}: {show(str(self.folder))} has no {part} sequences, which the config has; run `tune "
                    "teach` with it, or remove validation.source"
                )
            if found != dataset.fingerprint:
                raise DataError(
                    f"{self.name}: {show(str(self.folder))} is of other {part} sequences (fingerprint {found[:12]}) "
                    f"than this config has ({dataset.fingerprint[:12]}): another data.source, tokenizer, template or "
                    "max_seq_len; run `tune teach` with this config"
                )
            self.use(part, dataset)
            for shard in self.shards(part):
                if not self.is_whole(part, shard):
                    raise DataError(
                        f"{self.name}: {self.path(part, shard)} is missing or not whole; run the same `tune teach` "
                        "again, which goes on from there"
                    )

    def use(self, part: str, dataset: Dataset) -> None:
        """Finds the labels of each sequence by this dataset."""
        self._parts[part] = dataset, np.concatenate([[0], np.cumsum(dataset.label_counts)])

    def path(self, part: str, shard: int) -> Path:
        """A shard's file."""
        return self.folder / f"{part}-{shard:05d}.safetensors"

    def shards(self, part: str) -> range:
        """Numbers of a part's shards."""
        return range(-(-len(self._parts[part][0]) // self.facts.shard_sequences))

    def sequences(self, part: str, shard: int) -> range:
        """Numbers of the sequences in a shard."""
        first = shard * self.facts.shard_sequences
        return range(first, min(first + self.facts.shard_sequences, len(self._parts[part][0])))

    def planned(self, part: str, shard: int) -> list[PlannedTensor]:
        """What a shard holds."""
        own, firsts = self.sequences(part, shard), self._parts[part][1]
        labels, count = int(firsts[own.stop] - firsts[own.start]), self.facts.top_k
        return [
            PlannedTensor("ids", torch.int32, (labels, count)),
            PlannedTensor("log_probs", DTYPES[self.facts.dtype], (labels, count)),
            PlannedTensor("rest", torch.float32, (labels,)),
        ]

    def is_whole(self, part: str, shard: int) -> bool:
        """Whether a shard is there. Raises CheckpointError for a file that is not one of this folder's."""
        path = self.path(part, shard)
        if not path.is_file():
            return False
        found = {name: (one.dtype, one.shape) for name, one in read_header(path).tensors.items()}
        if found != {one.name: (DTYPE_NAMES[one.dtype], one.shape) for one in self.planned(part, shard)}:
            raise CheckpointError(f"{path}: holds other tensors than {MANIFEST} says; remove the file, and teach again")
        return True

    def write(self, part: str, shard: int, tops: list[TopTokens]) -> None:
        """A shard, of the likeliest tokens of its sequences in their order. Raises OSError."""
        path, planned = self.path(part, shard), self.planned(part, shard)
        wanted = [[one.ids for one in tops], [one.log_probs for one in tops], [one.rest for one in tops]]
        pieces = (
            piece.to(tensor.dtype) for tensor, of in zip(planned, wanted, strict=True) for piece in of if len(piece)
        )
        with write_aside(path) as temporary:
            write_tensor_file(temporary, planned, pieces, {"part": part, "shard": str(shard)})

    def read(self, batch: Batch, world: "World", *, validation: bool = False) -> TopTokens:
        """Those of a micro-batch `[b, s, k]`, on the device, where ranks share sequences of this rank's tokens; zeros
        where there is no label."""
        facts, (rows, length) = self.facts, batch.labels.shape
        place = "cpu" if holds_values(world.device) else world.device
        ids = torch.zeros(rows, length, facts.top_k, dtype=torch.int32, device=place)
        log_probs = torch.zeros(rows, length, facts.top_k, dtype=DTYPES[facts.dtype], device=place)
        rest = torch.zeros(rows, length, device=place)
        if holds_values(world.device):
            for row, numbers in enumerate(batch.sequences):
                self._fill(VALIDATION if validation else TRAIN, numbers, (ids[row], log_probs[row], rest[row]))
        found = [tensor.to(world.device) for tensor in (ids, log_probs, rest)]
        if world.context is not None:
            found = [own_tokens(tensor, world.context) for tensor in found]
        return TopTokens(found[0], found[1], found[2], facts.vocabulary)

    def _fill(self, part: str, numbers: tuple[int, ...], row: tuple[Tensor, Tensor, Tensor]) -> None:
        """A row of a batch, which holds these sequences one after the other."""
        dataset, firsts = self._parts[part]
        start = 0
        for number in numbers:
            labels = dataset[number].labels
            shard = number // self.facts.shard_sequences
            first = int(firsts[number] - firsts[shard * self.facts.shard_sequences])
            places = torch.from_numpy(np.flatnonzero(labels != IGNORED) + start)
            file = self._shard(self.path(part, shard))
            for name, tensor in zip(("ids", "log_probs", "rest"), row, strict=True):
                tensor[places] = file.get_slice(name)[first : first + len(places)]
            start += len(labels)

    def _shard(self, path: Path) -> Any:
        """A shard's file, opened; so many stay open."""
        if path not in self._open:
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[path] = safe_open(path, "pt")
        self._open.move_to_end(path)
        return self._open[path]


def open_taught(cfg: DistillFinetuneConfig, vocabulary: int) -> TaughtTokens | None:
    """What `distill.from_disk` names; None where it names nothing. vocabulary: ids that the model has.

    Raises CheckpointError for a folder that is none, ConfigError for one of another temperature or vocabulary.
    """
    keys = cfg.distill
    if keys.from_disk is None:
        return None
    folder = Path(keys.from_disk)
    facts = read_facts(folder)
    if facts.temperature != keys.temperature:
        raise ConfigError(
            f"distill.from_disk: {show(str(folder))} holds probabilities at temperature {facts.temperature:g}, and "
            f"distill.temperature is {keys.temperature:g}; set distill.temperature={facts.temperature:g}, or teach "
            "again"
        )
    if facts.vocabulary > vocabulary:
        raise ConfigError(
            f"distill.from_disk: {show(str(folder))} holds the likeliest of {facts.vocabulary} tokens, and the model "
            f"has {vocabulary}; run `tune teach` with this config"
        )
    return TaughtTokens(folder, facts)


def read_facts(folder: Path, name: str = "distill.from_disk") -> TaughtFacts:
    """Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        facts = TaughtFacts(**read_object(path))
        kinds = {"teacher": str, "top_k": int, "temperature": float, "vocabulary": int, "shard_sequences": int}
        right = all(isinstance(getattr(facts, word), kind) for word, kind in kinds.items()) and facts.dtype in DTYPES
        if not right or min(facts.top_k, facts.shard_sequences) < 1 or not isinstance(facts.data, dict):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise CheckpointError(
            f"{name}: {show(str(folder))} holds no {MANIFEST} of `tune teach`, expected a folder that it has written; "
            "run `tune teach --config CONFIG --out FOLDER`"
        ) from None
    return facts


def facts_text(facts: TaughtFacts) -> str:
    """The manifest's text."""
    return json.dumps(asdict(facts), indent=2) + "\n"
