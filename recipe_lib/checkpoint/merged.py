"""A base and an adapter as one Hugging Face folder: file to file, part of a tensor at a time, each rank its files.

What is merged is what was trained: the base in the type of the run and, if the run kept it in 4 or 8 bits, with the
numbers that these stand for.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from recipe_lib import files
from recipe_lib.adapters.merging import merge_rows
from recipe_lib.adapters.peft_names import EMBEDDING, HEAD, target_of
from recipe_lib.adapters.quantized import can_quantize, dequantized
from recipe_lib.checkpoint.adapter_files import AdapterFile, check_base, check_fits, read_adapter, score_keys
from recipe_lib.checkpoint.converted import Reader
from recipe_lib.checkpoint.merged_experts import MergedExperts
from recipe_lib.checkpoint.merged_external import merge_external, update_of
from recipe_lib.checkpoint.rank_agreement import RankGroup, check_shared, decide, together
from recipe_lib.checkpoint.saved_weights import SavedWeights
from recipe_lib.checkpoint.tensor_files import DTYPES, FileTensor, PlannedTensor, write_tensor_file
from recipe_lib.checkpoint.tokenizer_out import tokenizer_files
from recipe_lib.checkpoint.weight_accounts import check_weights, read_headers, tell_left_out
from recipe_lib.checkpoint.weights_in import unknown_extras
from recipe_lib.checkpoint.weights_out import (
    begin_folder,
    export_config,
    extra_metadata,
    finish_model,
    plan_shards,
)
from recipe_lib.models import DecoderSpec, read_config, read_trained_spec
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.models.scored_spec import scored_spec
from recipe_lib.models.spec import SCORE, ModelSpec
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
