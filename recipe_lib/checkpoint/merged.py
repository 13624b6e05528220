"""A base and an adapter as one Hugging Face folder: file to file, part of a tensor at a time, each rank its files.

What is merged is what was trained: the base in the type of the run and, if the run kept it in 4 or 8 bits, with the
numbers that these stand for.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib import files
from recipe_lib.adapters.merging import Update, merge_rows
from recipe_lib.adapters.peft_names import (
    EMBEDDING,
    EMBEDDING_FIRST,
    EMBEDDING_SECOND,
    FIRST,
    HEAD,
    LENGTHS,
    SECOND,
    FileModule,
    expert_factors,
    target_of,
)
from recipe_lib.adapters.quantized import can_quantize, dequantized
from recipe_lib.checkpoint.adapter_files import AdapterFile, check_base, check_fits, read_adapter, score_keys
from recipe_lib.checkpoint.converted import Reader
from recipe_lib.checkpoint.rank_agreement import RankGroup, SingleRank, check_shared, decide, together
from recipe_lib.checkpoint.saved_weights import SavedWeights
from recipe_lib.checkpoint.tensor_files import DTYPES, FileTensor, PlannedTensor, write_tensor_file
from recipe_lib.checkpoint.tokenizer_out import tokenizer_files
from recipe_lib.checkpoint.weight_accounts import check_weights, read_headers, tell_left_out
from recipe_lib.checkpoint.weights_in import load_weights, unknown_extras
from recipe_lib.checkpoint.weights_out import (
    begin_folder,
    export_config,
    export_model,
    extra_metadata,
    finish_model,
    plan_shards,
)
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config, read_trained_spec
from recipe_lib.models.families import scored_spec
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec, TensorLayout
from recipe_lib.models.weight_names import WeightEntry, parameter_shapes, weight_map, written_layout
from recipe_lib.units import GIB

_Reader = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class _Base:
    """The frozen weights in their files."""

    tensors: dict[str, FileTensor]  # by their names in the files
    entries: dict[str, WeightEntry]  # by our names
    storage: str  # how the run kept them: the word of lora.quantize_base
    dtype: torch.dtype  # of the run
    saved: SavedWeights  # what the adapter has of them


def merge_adapter(
    base_folder: Path,
    adapter_folder: Path,
    out: Path,
    *,
    quantize: str,
    dtype: torch.dtype,
    ranks: RankGroup,
    implementation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tokenizer_folder: Path | None = None,
    chat_template: str | Path | None = None,
    stop_ids: Collection[int] = (),
    max_shard_bytes: int = 4 * GIB,
    card: str | None = None,
) -> None:
    """Writes the folder `out`: the base with the adapter added, computed in fp32. Collective.

    quantize, dtype: lora.quantize_base and dtype of the run that trained the adapter. implementation: of the base, see
    `read_trained_spec`. out_dtype: of the files, if another one. tokenizer_folder (default: the base's), chat_template,
    stop_ids, max_shard_bytes, card: as for `export_model`. A tied model whose embedding or head is adapted is no longer
    tied in `out`. The files are dealt out to the ranks, which need a disk in common; a model of another library is
    merged by the first of them, in its host memory.
    Raises StorageError or CheckpointError on every rank; then `out` is as it was.
    """
    stored = out_dtype or dtype
    adapter, spec, saved = together(ranks, lambda: _checked(base_folder, adapter_folder, implementation))
    if ranks.rank == 0:
        tell_left_out(spec, base_folder, "export")
    if isinstance(spec, ExternalSpec):
        beside = {"tokenizer_folder": tokenizer_folder or base_folder, "chat_template": chat_template,
                  "stop_ids": stop_ids, "max_shard_bytes": max_shard_bytes, "card": card}  # fmt: skip
        merge = partial(merge_external, base_folder, adapter, saved, spec, out, quantize, dtype, stored, **beside)
        decide(ranks, merge)
        return
    assert isinstance(saved.spec, DecoderSpec)
    written = _untied(saved.spec, adapter)
    parameters = {
        name: torch.empty(shape, dtype=stored, device="meta") for name, shape in parameter_shapes(written).items()
    }
    for name, (_, entry) in adapter.extras.items():
        kept = stored if DTYPES[entry.dtype].is_floating_point else DTYPES[entry.dtype]
        parameters[name] = torch.empty(entry.shape, dtype=kept, device="meta")
    shards = plan_shards(written, parameters, max_shard_bytes, adapter.extras)
    tensors = read_headers(base_folder)
    entries = {entry.our_name: entry for entry in weight_map(spec, tensors)}
    base = _Base(tensors=tensors, entries=entries, storage=quantize, dtype=dtype, saved=saved)
    copied = tokenizer_files(tokenizer_folder or base_folder)
    temporary = Path(decide(ranks, lambda: begin_folder(out, shards, copied)))
    try:

        def write() -> None:
            check_shared(temporary)
            for name in sorted(shards)[ranks.rank :: ranks.size]:
                pieces = _pieces(shards[name], written, base, adapter)
                cast = (piece.to(stored) if piece.is_floating_point() else piece for piece in pieces)
                held = {tensor.name for tensor in shards[name]} & adapter.extras.keys() - {SCORE}
                write_tensor_file(temporary / name, shards[name], cast, {"format": "pt"} | extra_metadata(held))

        together(ranks, write)
        config = export_config(read_config(base_folder) | score_keys(adapter.metadata), written, stored)
        if written.vocab_size != spec.vocab_size:  # the adapter brings another vocabulary along
            config["vocab_size"] = written.vocab_size
        decide(ranks, lambda: finish_model(temporary, out, shards, config, copied, chat_template, stop_ids, card))
    except BaseException:
        if ranks.rank == 0:
            files.discard(temporary)
        raise


def _checked(
    base_folder: Path, adapter_folder: Path, implementation: str | None
) -> tuple[AdapterFile, ModelSpec, SavedWeights]:
    """Return the adapter, the spec of the base, and what the adapter has of it. Raises CheckpointError."""
    adapter = read_adapter(adapter_folder)
    if SCORE in adapter.extras:
        rows = adapter.extras[SCORE][1].shape[0]
        spec: ModelSpec = scored_spec(read_config(base_folder), str(base_folder), rows)
    else:
        spec = read_trained_spec(read_config(base_folder), str(base_folder), implementation)
    check_weights(spec, base_folder)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base_folder)
    extras = {name for name, tensor in read_headers(base_folder).items() if tensor.extra}
    if extras - adapter.extras.keys():
        raise unknown_extras(base_folder, extras - adapter.extras.keys())
    return adapter, spec, saved


def _untied(spec: DecoderSpec, adapter: AdapterFile) -> DecoderSpec:
    """The spec of the merged model: embedding and head differ as soon as one of them has an adapter."""
    return replace(spec, tied=spec.tied and not {EMBEDDING, HEAD} & adapter.tensors.keys())


def _pieces(
    tensors: list[PlannedTensor], spec: DecoderSpec, base: _Base, adapter: AdapterFile
) -> Iterator[torch.Tensor]:
    """The data of a file's tensors, in their order."""
    parts: dict[str, list[str]] = {}
    for entry in sorted(weight_map(spec), key=lambda entry: entry.start):
        parts.setdefault(entry.file_name, []).append(entry.our_name)
    shapes, layout = parameter_shapes(spec), written_layout(spec)
    experts = {} if layout is None else layout.made
    parts |= {} if layout is None else {name: [own] for name, own in layout.renamed.items()}
    merged = MergedExperts(spec, adapter, base.tensors, base.storage, base.dtype)
    adapted = {module.name: module for module in adapter.modules(spec)}
    names_in_file = {part.module: name for name, module in adapted.items() for part in module.parts}
    for tensor in tensors:
        if tensor.name in adapter.extras:
            yield adapter.read_extra(tensor.name)
            continue
        if tensor.name in experts:
            yield from merged.pieces(experts[tensor.name], tensor.name)
            continue
        module = tensor.name.removesuffix(".weight")
        if spec.mixture is not None:  # a router's adapter has the name of transformers' module
            module = names_in_file.get(parts[tensor.name][0].removesuffix(".weight"), module)
        update = update_of(adapter, adapted[module]) if module != tensor.name and module in adapted else None
        if len(tensor.shape) != 2:
            yield from (_reader(base, name)(0, shapes[name][0]) for name in parts[tensor.name])
            continue
        start = 0
        for name in parts[tensor.name]:
            rows = shapes[name][0]
            own = update if update is None or len(parts[tensor.name]) == 1 else update.of_rows(start, start + rows)
            yield from merge_rows(_reader(base, name), rows, own)
            start += rows


def _reader(base: _Base, name: str) -> _Reader:
    """Return a reader of rows of one of our parameters as the run had them: `(start, stop)` to `[stop - start, m]`.

    What the adapter brings along is read as it has it.
    """
    entry = base.entries.get(name) or base.entries[f"{EMBEDDING}.weight"]  # the head of a base that ties it
    offset = entry.start

    def read(start: int, stop: int) -> torch.Tensor:
        with Reader(base.tensors) as reader:
            source = reader.opened(entry, base.dtype)
            rows = base.saved.read_rows(
                name, start=start, stop=stop, read_base=lambda: source[offset + start : offset + stop]
            )
            return rows.to(base.dtype)

    target = target_of(name.removesuffix(".weight"))
    if base.storage == "none" or target in (None, "router", "embedding", "head") or not name.endswith(".weight"):
        return read
    if name in base.saved.parts:  # which was trained as it is
        return read
    shape = base.tensors[entry.file_name].entry.shape if entry.view is None else entry.view.shape
    rows = entry.length or shape[0]
    if not can_quantize(shape[1], rows, base.storage):
        return read
    weight = dequantized(read(0, rows), base.storage)
    return lambda start, stop: weight[start:stop]


class MergedExperts:
    """Reads a parameter `[E, o, i]` as the run had it, and gives what files have of it.

    All of it is in host memory, since the scales of a quantized one are those of all experts together.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        adapter: AdapterFile,
        found: Mapping[str, FileTensor],
        storage: str,
        dtype: torch.dtype,
    ) -> None:
        """found: the base's tensors. storage, dtype: how the run kept them."""
        self._places = {entry.our_name: entry for entry in weight_map(spec, found)}
        self._modules = {f"{module.parts[0].module}.weight": module for module in adapter.modules(spec)}
        self._adapter, self._found, self._storage, self._dtype = adapter, found, storage, dtype
        self._name = ""

    def pieces(self, made: Any, name: str) -> Iterator[torch.Tensor]:
        """The data of a tensor of files, in consecutive pieces. made: the `WrittenExperts` that it is one of."""
        if self._name != made.parameter:
            self._read(made.parameter)
        expert, first, last = made.tensors[name]
        if expert is not None:
            yield self._merged(expert)[first:last]
            return
        for number in range(len(self._weight)):
            yield self._merged(number).t().unsqueeze(0)

    def _read(self, name: str) -> None:
        self._name, self._weight = "", torch.empty(0)
        with Reader(self._found) as read:
            weight = read.opened(self._places[name], self._dtype)[:].to(self._dtype)
        _, rows, columns = weight.shape
        if self._storage != "none" and can_quantize(columns, rows, self._storage):
            weight = dequantized(weight.flatten(0, 1), self._storage).view_as(weight)
        self._name, self._weight = name, weight
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        module = self._modules.get(name)
        if module is not None:
            self._scaling = self._adapter.config.scaling_of(module)
            first, second = (self._adapter.read(module.name, suffix) for suffix in (FIRST, SECOND))
            self._factors = expert_factors(first, second, module.experts)

    def _merged(self, number: int) -> torch.Tensor:
        """One expert's matrix `[o, i]`."""
        weight = self._weight[number]
        update = None
        if self._factors is not None:
            first, second = self._factors
            update = Update(first[number], second[number], self._scaling)
        return torch.cat(list(merge_rows(lambda start, stop: weight[start:stop], len(weight), update)))


@torch.no_grad()
def merge_external(
    base_folder: Path,
    adapter: AdapterFile,
    saved: SavedWeights,
    spec: ExternalSpec,
    out: Path,
    quantize: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    **beside: Any,
) -> None:
    """Writes the folder `out`: the base with the adapter added, on one rank; the model is in host memory meanwhile.

    saved: what the adapter has of the base's weights. quantize, dtype: how the run that trained the adapter kept the
    base. stored: the type of what is written. beside: as for `export_model`. Raises StorageError or CheckpointError;
    then `out` is as it was.
    """
    if adapter.extras:
        raise CheckpointError(f"{adapter.path}: holds {min(adapter.extras)}, which a recipe added; it cannot be merged")
    model = build_meta(spec, dtype)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, base_folder)
    layout = spec.layout()
    adapted = {module.name: module for module in adapter.modules(spec)}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        num_rows = len(parameter) if parameter.dim() else 1
        weight = saved.read_rows(name, start=0, stop=num_rows, read_base=parameter.detach)
        if module != name and module in layout.linears:
            weight = _merged(weight, module, adapter, adapted, quantize, layout)
        parameter.data = weight.to(stored) if weight.is_floating_point() else weight
    export_model(model, spec, read_config(base_folder), out, world=SingleRank(), **beside)


def _merged(
    weight: Tensor,
    module: str,
    adapter: AdapterFile,
    adapted: Mapping[str, FileModule],
    quantize: str,
    layout: TensorLayout,
) -> Tensor:
    """A linear's weight as the run had it, with its adapter if it has one."""
    rows, columns = weight.shape
    if quantize != "none" and module in layout.plain and can_quantize(columns, rows, quantize):
        weight = dequantized(weight, quantize)
    if module not in adapted:
        return weight
    turned = weight.t() if module in layout.transposed else weight
    pieces = merge_rows(lambda start, stop: turned[start:stop], turned.shape[0], update_of(adapter, adapted[module]))
    whole = torch.cat(list(pieces))
    return whole.t().contiguous() if module in layout.transposed else whole


def update_of(adapter: AdapterFile, module: FileModule) -> Update:
    """The adapter of one module of a file."""
    lengths = adapter.read(module.name, LENGTHS) if adapter.config.dora else None
    scaling = adapter.config.scaling_of(module)
    if module.is_embedding:  # its matrices are those of the transposed weight
        first, second = (adapter.read(module.name, suffix).t() for suffix in (EMBEDDING_SECOND, EMBEDDING_FIRST))
        return Update(first, second, scaling, lengths, by_column=True)
    return Update(adapter.read(module.name, FIRST), adapter.read(module.name, SECOND), scaling, lengths)
