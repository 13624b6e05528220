"""A base and an adapter as one Hugging Face folder: file to file, part of a tensor at a time, each
rank its files.

What is merged is what was trained: the base in the type of the run and, if the run kept it in 4 or
8 bits, with the numbers that these stand for.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib.adapters.peft_names import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    FileModule,
    get_target,
    unstack_expert_factors,
)
from recipe_lib.adapters.quantized import can_quantize, fake_quantize_weight
from recipe_lib.checkpoint.adapter_base_weights import SavedWeights
from recipe_lib.checkpoint.adapter_files import (
    AdapterFile,
    check_base,
    check_fits,
    read_adapter,
    read_score_keys,
)
from recipe_lib.checkpoint.model_export import (
    SideFiles,
    TensorPieces,
    export_config,
    export_model,
    find_padding,
    list_model_files,
    make_extra_metadata,
    plan_shards,
    stage_folder,
)
from recipe_lib.checkpoint.rank_groups import (
    RankGroup,
    SingleRank,
    check_shared,
    run_on_all_ranks,
    run_on_rank_0,
)
from recipe_lib.checkpoint.safetensors_files import (
    DTYPES,
    FileTensor,
    PlannedTensor,
    Reader,
    write_tensor_file,
)
from recipe_lib.checkpoint.tensor_matching import check_weights, log_left_out, read_headers
from recipe_lib.checkpoint.weight_loading import load_weights, make_unknown_extras_error
from recipe_lib.errors import CheckpointError
from recipe_lib.models import build_meta, read_config, read_trained_spec
from recipe_lib.models.families import build_scored_spec
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import SCORE, DecoderSpec, ExternalSpec, ModelSpec
from recipe_lib.models.weight_names import WeightEntry, build_weight_map, compute_parameter_shapes
from recipe_lib.ops.fused_kernels import cut_rows
from recipe_lib.units import GIB

# An adapter added to the weight that it was trained with, some rows at a time.


_PIECE_ELEMENTS = 2**24  # elements of the weight that are computed at a time: 64 MiB in fp32


@dataclass(frozen=True)
class Update:
    """The adapter of a weight `[n, m]`: `scaling * second @ first`, with first `[r, m]` and second
    `[n, r]`.

    lengths: DoRA's, of the n rows, or with `by_column` (an embedding) of the m columns. None: LoRA.
    """

    first: Tensor
    second: Tensor
    scaling: float
    lengths: Tensor | None = None
    by_column: bool = False

    def slice_rows(self, start: int, stop: int) -> "Update":
        """The update of these rows of the weight alone; not for one whose lengths are by column."""
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return replace(self, second=self.second[start:stop], lengths=lengths)

    def add_to(self, rows: Tensor, start: int) -> Tensor:
        """Rows of the weight, the first of them number `start`, with the update; DoRA's lengths not
        yet applied.
        """
        second = self.second[start : start + len(rows)].to(rows.dtype)
        return torch.addmm(rows, second, self.first.to(rows.dtype), alpha=self.scaling)


@torch.no_grad()
def merge_rows(
    read_rows: Callable[[int, int], Tensor], count: int, update: Update | None
) -> Iterator[Tensor]:
    """The merged weight `[count, m]` in consecutive pieces of rows, computed in fp32 (fp64 for a
    weight of fp64).

    read_rows: `(start, stop)` to those rows of the weight; it is called twice for an embedding with
    DoRA, whose lengths are those of whole columns. update: None leaves the weight as it is.
    """
    if update is None:
        for start, stop in _cut_pieces(read_rows, count):
            yield _widen(read_rows(start, stop))
        return
    factors = (
        _compute_column_factors(read_rows, count, update)
        if update.by_column and update.lengths is not None
        else None
    )
    for start, stop in _cut_pieces(read_rows, count):
        rows = update.add_to(_widen(read_rows(start, stop)), start)
        if factors is not None:
            rows.mul_(factors)
        elif update.lengths is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.mul_(update.lengths[start:stop].to(rows.dtype).unsqueeze(1) / lengths)
        yield rows


def _compute_column_factors(
    read_rows: Callable[[int, int], Tensor], count: int, update: Update
) -> Tensor:
    """Return what each column `[m]` is multiplied by: its trained length over the one it has with
    the update.
    """
    squares = sum(
        update.add_to(_widen(read_rows(start, stop)), start).square_().sum(dim=0)
        for start, stop in _cut_pieces(read_rows, count)
    )
    assert isinstance(squares, Tensor) and update.lengths is not None
    return update.lengths.to(squares.dtype) / squares.sqrt_()


def _widen(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _cut_pieces(read_rows: Callable[[int, int], Tensor], count: int) -> list[tuple[int, int]]:
    width = read_rows(0, 1).shape[1] if count else 1
    return cut_rows(count, width, _PIECE_ELEMENTS)


# A base and an adapter.


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

    quantize, dtype: lora.quantize_base and dtype of the run that trained the adapter.
    implementation: of the base, see `read_trained_spec`. out_dtype: of the files, if another one.
    tokenizer_folder (default: the base's), chat_template, stop_ids, max_shard_bytes, card: as for
    `export_model`. A tied model whose embedding or head is adapted is no longer tied in `out`. The
    files are dealt out to the ranks, which need a disk in common; a model of another library is
    merged by the first of them, in its host memory. Raises StorageError or CheckpointError on every
    rank; then `out` is as it was.
    """
    stored = out_dtype or dtype
    adapter, spec, saved = run_on_all_ranks(
        ranks, lambda: _read_checked(base_folder, adapter_folder, implementation)
    )
    if ranks.rank == 0:
        log_left_out(spec, base_folder, "export")
    tokenizer_folder = tokenizer_folder or base_folder
    if isinstance(spec, ExternalSpec):
        beside = {"tokenizer_folder": tokenizer_folder, "chat_template": chat_template, "stop_ids": stop_ids,
                  "max_shard_bytes": max_shard_bytes, "card": card}  # fmt: skip
        merge = partial(
            _merge_external,
            base_folder,
            adapter,
            saved,
            spec,
            out,
            quantize,
            dtype,
            stored,
            **beside,
        )
        run_on_rank_0(ranks, merge)
        return
    assert isinstance(saved.spec, DecoderSpec)
    # Embedding and head differ as soon as one of them has an adapter.
    written = replace(
        saved.spec, tied=saved.spec.tied and not {EMBEDDING, HEAD} & adapter.tensors.keys()
    )
    parameters = {
        name: PlannedTensor(name, stored, shape)
        for name, shape in compute_parameter_shapes(written).items()
    }
    for name, (_, entry) in adapter.extras.items():
        kept = stored if DTYPES[entry.dtype].is_floating_point else DTYPES[entry.dtype]
        parameters[name] = PlannedTensor(name, kept, entry.shape)
    shards = plan_shards(written, parameters, max_shard_bytes, adapter.extras)
    tensors = read_headers(base_folder)
    weights = _MergedWeights(
        spec=written,
        adapter=adapter,
        saved=saved,
        tensors=tensors,
        entries={entry.our_name: entry for entry in build_weight_map(spec, tensors)},
        storage=quantize,
        dtype=dtype,
        stored=stored,
    )
    config = export_config(
        read_config(base_folder) | read_score_keys(adapter.metadata), written, stored
    )
    if written.vocab_size != spec.vocab_size:  # the adapter brings another vocabulary along
        config["vocab_size"] = written.vocab_size
    contents = list_model_files(shards, config)
    side_files = SideFiles(
        tokenizer_folder, chat_template, stop_ids, card, pad_id=find_padding(config)
    )
    with stage_folder(out, shards, contents, side_files, ranks) as temporary:

        def write() -> None:
            check_shared(temporary)
            pieces = TensorPieces(written, weights.read, parameters, adapter.extras)
            for name in sorted(shards)[ranks.rank :: ranks.size]:
                extras = {tensor.name for tensor in shards[name]} & adapter.extras.keys() - {SCORE}
                metadata = {"format": "pt"} | make_extra_metadata(extras)
                write_tensor_file(
                    temporary / name, shards[name], pieces.read_all(shards[name]), metadata
                )

        run_on_all_ranks(ranks, write)


def _read_checked(
    base_folder: Path, adapter_folder: Path, implementation: str | None
) -> tuple[AdapterFile, ModelSpec, SavedWeights]:
    """Return the adapter, the spec of the base, and what the adapter has of it. Raises
    CheckpointError.
    """
    adapter = read_adapter(adapter_folder)
    if SCORE in adapter.extras:
        rows = adapter.extras[SCORE][1].shape[0]
        spec: ModelSpec = build_scored_spec(read_config(base_folder), str(base_folder), rows)
    else:
        spec = read_trained_spec(read_config(base_folder), str(base_folder), implementation)
    check_weights(spec, base_folder)
    saved = check_fits(adapter, spec)
    check_base(adapter, spec, base_folder)
    extras = {name for name, tensor in read_headers(base_folder).items() if tensor.extra}
    if extras - adapter.extras.keys():
        raise make_unknown_extras_error(base_folder, extras - adapter.extras.keys())
    return adapter, spec, saved


class _MergedWeights:
    """The parameters of a base, as the run had them, with the adapter added."""

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        adapter: AdapterFile,
        saved: SavedWeights,
        tensors: Mapping[str, FileTensor],
        entries: Mapping[str, WeightEntry],
        storage: str,
        dtype: torch.dtype,
        stored: torch.dtype,
    ) -> None:
        """spec: of the merged model. saved: what the adapter has of the base. tensors, entries: of
        the base's files.

        storage: how the run kept the base, the word of lora.quantize_base. dtype: of the run.
        stored: of what is read.
        """
        self._adapter, self._saved = adapter, saved
        self._tensors, self._entries = tensors, entries
        self._storage, self._dtype, self._stored = storage, dtype, stored
        self._shapes = compute_parameter_shapes(spec)
        self._modules = {
            part.module: (module, part) for module in adapter.modules(spec) for part in module.parts
        }

    def read(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter in consecutive pieces of rows, that of a layer's experts in one
        piece.
        """
        if name in self._adapter.extras:
            extra = self._adapter.read_extra(name)
            yield extra.to(self._stored) if extra.is_floating_point() else extra
            return
        shape = self._shapes[name]
        adapted = self._modules.get(name.removesuffix(".weight"))
        if len(shape) == 3:
            yield self._read_experts(name, None if adapted is None else adapted[0])
            return
        read_rows = self._open(name, shape)
        if len(shape) < 2:
            yield read_rows(0, shape[0]).to(self._stored)
            return
        update = None
        if adapted is not None:
            module, part = adapted
            update = _read_update(self._adapter, module)
            if len(module.parts) > 1:
                update = update.slice_rows(part.start, part.start + part.rows)
        for piece in merge_rows(read_rows, shape[0], update):
            yield piece.to(self._stored)

    def _open(self, name: str, shape: tuple[int, ...]) -> Callable[[int, int], Tensor]:
        """Return a reader of rows of a parameter as the run had them: `(start, stop)` to `[stop -
        start, m]`.

        What the adapter brings along is read as it has it.
        """
        entry = (
            self._entries.get(name) or self._entries[f"{EMBEDDING}.weight"]
        )  # the head of a base that ties it

        def read(start: int, stop: int) -> Tensor:
            with Reader(self._tensors) as reader:
                source = reader.open_entry(entry, self._dtype)
                rows = self._saved.read_rows(
                    name,
                    start=start,
                    stop=stop,
                    read_base=lambda: source[entry.start + start : entry.start + stop],
                )
                return rows.to(self._dtype)

        target = get_target(name.removesuffix(".weight"))
        is_kept = target in (None, "router", "embedding", "head") or not name.endswith(".weight")
        if is_kept or name in self._saved.parts or not self._is_rounded(*shape):
            return read
        weight = fake_quantize_weight(read(0, shape[0]), self._storage)
        return lambda start, stop: weight[start:stop]

    def _is_rounded(self, rows: int, columns: int) -> bool:
        """Return whether the run kept a matrix in 4 or 8 bits."""
        return self._storage != "none" and can_quantize(columns, rows, self._storage)

    def _read_experts(self, name: str, module: FileModule | None) -> Tensor:
        """Return a parameter `[E, o, i]`; the scales of a quantized one are those of all experts
        together.
        """
        with Reader(self._tensors) as reader:
            weight = reader.open_entry(self._entries[name], self._dtype)[:].to(self._dtype)
        if self._is_rounded(*weight.shape[1:]):
            weight = fake_quantize_weight(weight.flatten(0, 1), self._storage).view_as(weight)
        if module is None:
            return weight.to(self._stored)
        first, second = (self._adapter.read(module.name, suffix) for suffix in (LORA_A, LORA_B))
        scaling = self._adapter.config.compute_scaling(module)
        merged = (
            weight if self._stored == self._dtype else torch.empty_like(weight, dtype=self._stored)
        )
        for number, factors in enumerate(
            zip(*unstack_expert_factors(first, second, module.experts), strict=True)
        ):
            merged[number] = _merge_matrix(weight[number], Update(*factors, scaling))
        return merged


@torch.no_grad()
def _merge_external(
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
    """Write the folder `out`: the base with the adapter added, on one rank; the model is in host
    memory meanwhile.

    saved: what the adapter has of the base's weights. quantize, dtype: how the run that trained the
    adapter kept the base. stored: the type of what is written. beside: as for `export_model`.
    Raises StorageError or CheckpointError; then `out` is as it was.
    """
    if adapter.extras:
        raise CheckpointError(
            f"{adapter.path}: holds {min(adapter.extras)}, which a recipe added; it cannot be"
            " merged"
        )
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
            rows, columns = weight.shape
            if (
                quantize != "none"
                and module in layout.plain
                and can_quantize(columns, rows, quantize)
            ):
                weight = fake_quantize_weight(weight, quantize)
            if module in adapted:
                is_transposed = module in layout.transposed
                update = _read_update(adapter, adapted[module])
                merged = _merge_matrix(weight.t() if is_transposed else weight, update)
                weight = merged.t().contiguous() if is_transposed else merged
        parameter.data = weight.to(stored) if weight.is_floating_point() else weight
    export_model(model, spec, read_config(base_folder), out, world=SingleRank(), **beside)


def _merge_matrix(weight: Tensor, update: Update) -> Tensor:
    """Return a whole matrix `[n, m]` with its update, as `merge_rows` computes it."""
    return torch.cat(list(merge_rows(lambda start, stop: weight[start:stop], len(weight), update)))


def _read_update(adapter: AdapterFile, module: FileModule) -> Update:
    """Return the adapter of one module of a file."""
    lengths = adapter.read(module.name, MAGNITUDE) if adapter.config.dora else None
    scaling = adapter.config.compute_scaling(module)
    if module.is_embedding:  # its matrices are those of the transposed weight
        first, second = (
            adapter.read(module.name, suffix).t() for suffix in (EMBEDDING_B, EMBEDDING_A)
        )
        return Update(first, second, scaling, lengths, by_column=True)
    return Update(
        adapter.read(module.name, LORA_A), adapter.read(module.name, LORA_B), scaling, lengths
    )
