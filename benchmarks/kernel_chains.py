"""Fuse kernels on paper, and count the least bytes that the fused ones have to move.

`layer_kernels.py` calls `link_kernels` on the kernels of a traced step, and `fuse_kernels` on those
that are bound by memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.plan.tracing.trace import Op


@dataclass(frozen=True)
class View:
    """The part of a storage that a kernel reads or writes."""

    storage: int  # index into `Trace.storages`
    bytes: int  # of its elements, each counted once, however often it is expanded
    geometry: tuple[Any, ...] = ()  # tells the views of a storage apart


# A storage's values: (storage, index of the kernel that wrote them; -1: they were there before).
Version = tuple[int, int]


@dataclass
class Kernel:
    """An operator with the memory that it reads and writes."""

    op: Op
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()
    # Set by `link_kernels`. A version -> its views, as this kernel reads them.
    read_versions: dict[Version, set[View]] = field(default_factory=dict)
    # A version -> its bytes, for those that this kernel writes.
    written_versions: dict[Version, int] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelGraph:
    """Kernels in the order of issue, and what each of them needs."""

    kernels: list[Kernel]
    storage_bytes: dict[int, int]  # of each storage
    # Version -> indices of the kernels that read it.
    readers: dict[Version, set[int]]

    def count_least_bytes(self, chain: set[int]) -> int:
        """Return the least bytes of a chain, given by the indices of its kernels."""
        return sum(self.share_least_bytes(chain).values())

    def share_least_bytes(self, chain: set[int]) -> dict[int, int]:
        """Return each kernel's part of a chain's least bytes, by its index.

        The first kernel that reads a tensor has its bytes; what a later one reads of it in addition
        is its part.
        """
        parts = dict.fromkeys(sorted(chain), 0)
        views: dict[Version, set[View]] = defaultdict(set)
        read_bytes: dict[Version, int] = defaultdict(int)
        for index in parts:
            for version, read_views in self.kernels[index].read_versions.items():
                if version[1] in chain:
                    continue
                views[version] |= read_views
                # Views of a storage may overlap: together they are the storage at most.
                num_bytes = min(
                    self.storage_bytes[version[0]], sum(view.bytes for view in views[version])
                )
                parts[index] += num_bytes - read_bytes[version]
                read_bytes[version] = num_bytes
            for version, num_bytes in self.kernels[index].written_versions.items():
                if self.readers[version] - chain:
                    parts[index] += num_bytes
        return parts


def link_kernels(kernels: list[Kernel], storage_bytes: dict[int, int]) -> KernelGraph:
    """Find which kernel reads what another one wrote.

    kernels: in the order of issue, all that read what any of them writes. storage_bytes: of each
    storage.
    """
    writers: dict[int, int] = {}
    readers: dict[Version, set[int]] = defaultdict(set)
    for index, kernel in enumerate(kernels):
        for view in kernel.reads:
            version = (view.storage, writers.get(view.storage, -1))
            kernel.read_versions.setdefault(version, set()).add(view)
            readers[version].add(index)
        for view in kernel.writes:
            version = (view.storage, writers.get(view.storage, -1))
            if view.bytes < storage_bytes[view.storage]:
                # It comes after what wrote the other parts, and reads none of them.
                kernel.read_versions.setdefault(version, set())
                readers[version].add(index)
            kernel.written_versions[view.storage, index] = view.bytes
        writers.update({view.storage: index for view in kernel.writes})
    return KernelGraph(kernels, storage_bytes, readers)


def fuse_kernels(graph: KernelGraph, window: Sequence[int], fusible: set[int]) -> list[set[int]]:
    """Return the chains of a part of the kernels, as sets of their indices.

    Two kernels that share a tensor are fused where that saves bytes, and where no other kernel has
    to run between them. The pair that saves most is first. window: indices of the kernels that may
    run between. fusible: those that may be fused; each is in one chain, which may have it alone.
    """
    chains = {index: {index} for index in window}  # a chain's first index -> its kernels
    chain_of = {index: index for index in window}
    savings: dict[tuple[int, int], int] = {}

    def note_savings(chain: int) -> None:
        """Set the bytes that fusing a chain with each of its neighbors saves."""
        for pair in [pair for pair in savings if chain in pair]:
            del savings[pair]
        neighbors = set()
        for index in chains[chain]:
            kernel = graph.kernels[index]
            for version in [*kernel.read_versions, *kernel.written_versions]:
                neighbors |= {version[1], *graph.readers[version]} & fusible
        least = graph.count_least_bytes(chains[chain])
        for neighbor in {chain_of[index] for index in neighbors} - {chain}:
            saved = (
                least
                + graph.count_least_bytes(chains[neighbor])
                - graph.count_least_bytes(chains[chain] | chains[neighbor])
            )
            if saved > 0:
                savings[min(chain, neighbor), max(chain, neighbor)] = saved

    def list_next(chain: int) -> set[int]:
        """Return the chains that read what a chain writes."""
        readers = set()
        for index in chains[chain]:
            for version in graph.kernels[index].written_versions:
                readers |= graph.readers[version] & chain_of.keys()
        return {chain_of[index] for index in readers} - {chain}

    def has_detour(first: int, last: int) -> bool:
        """Return True if a way leads from one chain to another through a third one."""
        found = list_next(first) - {last}
        pending = list(found)
        while pending:
            following = list_next(pending.pop())
            if last in following:
                return True
            pending += following - found
            found |= following
        return False

    for index in window:
        if index in fusible:
            note_savings(index)
    while True:
        for first, last in sorted(savings, key=lambda pair: (-savings[pair], pair)):
            if not has_detour(first, last) and not has_detour(last, first):
                break
        else:
            return [chain for first, chain in sorted(chains.items()) if first in fusible]
        merged = chains.pop(last)
        chains[first] |= merged
        chain_of.update(dict.fromkeys(merged, first))
        for pair in [pair for pair in savings if last in pair]:
            del savings[pair]
        note_savings(first)
