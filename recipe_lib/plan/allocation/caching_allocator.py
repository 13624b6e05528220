"""A model of CUDA's caching allocator (torch's native backend): which segments a run's allocations
make it take.

Rules from pytorch c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, as torch 2.11
to 2.13 have them. Not modeled: CUDA graphs' private pools, several threads, address space that runs
out in expandable mode, and the settings `max_split_size`, `roundup_power2_divisions` and
`garbage_collection_threshold`.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from recipe_lib.units import MIB, format_bytes

# Blocks of memory and the pools they wait in, for the model of CUDA's caching allocator
# (allocator.py).


ROUNDING = 512  # every block is a multiple of it
SMALL_SIZE = MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # segments and pages of the small pool
LARGE_SEGMENT = 20 * MIB  # pages of the large pool, and the segment of a request from 1 to 10 MiB
LARGE_REQUEST = 10 * MIB  # requests from here on take a segment of their own size
SEGMENT_ROUNDING = 2 * MIB  # which is a multiple of it
# Kernels of a stream that a host can have issued and that are not done: about 1000 for each stream,
# as measured in forums.developer.nvidia.com/t/68937; the next launch waits. No document of NVIDIA's
# has the number.
LAUNCH_QUEUE = 1024


def round_size(size: int) -> int:
    """What a block for so many bytes has at the least (`round_size` in
    CUDACachingAllocator.cpp).
    """
    return -(-size // ROUNDING) * ROUNDING


class Block:
    """A piece of a segment; what `malloc` hands out.

    mapped: it has memory; a stretch of an expandable segment may have addresses only. previous,
    next: its neighbors in the segment. streams: others than its own that use it. pending: how many
    of them may still do so after it was freed.
    """

    __slots__ = (
        "address",
        "size",
        "requested",
        "pool",
        "allocated",
        "mapped",
        "previous",
        "next",
        "streams",
        "pending",
    )

    def __init__(self, address: int, size: int, pool: "Pool", mapped: bool = True):
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.requested = self.pending = 0
        self.allocated = False
        self.previous: Block | None = None
        self.next: Block | None = None
        self.streams: set[int] | None = None

    @property
    def idle(self) -> bool:
        """Neither handed out nor still in use by a stream."""
        return not self.allocated and not self.pending


class Pool:
    """The small or the large blocks of one stream that are free, by size and address, and those
    without memory.
    """

    __slots__ = "small", "stream", "page", "free", "unmapped", "blocks"

    def __init__(self, small: bool, stream: int):
        self.small, self.stream = small, stream
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []
        self.blocks: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Of now on the block is free, or has no memory."""
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """The opposite."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.blocks[block.address]


def compute_segment_size(size: int) -> int:
    """Bytes of a new segment for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return (
        LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
    )


def compute_growable_size(block: Block) -> int:
    """Bytes that the block has, with the addresses after it that have no memory yet."""
    following = block.next
    return block.size + (following.size if following and not following.mapped else 0)


def split_block(block: Block, size: int) -> Block:
    """Leave a block its first `size` bytes, and return the rest as another, which follows it."""
    rest = Block(block.address + size, block.size - size, block.pool, mapped=block.mapped)
    rest.previous, rest.next = block, block.next
    if block.next:
        block.next.previous = rest
    block.next, block.size = rest, size
    return rest


def join_neighbors(block: Block) -> None:
    """A free block, not yet in its pool, takes in those before and after it that are free too; one
    without memory those without (`try_merge_blocks`).
    """
    pool, before, after = block.pool, block.previous, block.next
    if before and not before.allocated and not before.pending and before.mapped == block.mapped:
        pool.remove(before)
        block.address, block.size, block.previous = (
            before.address,
            block.size + before.size,
            before.previous,
        )
        if before.previous:
            before.previous.next = block
    if after and not after.allocated and not after.pending and after.mapped == block.mapped:
        pool.remove(after)
        block.size, block.next = block.size + after.size, after.next
        if after.next:
            after.next.previous = block


# Like a device's: above 32 bits, so that viewers read every address as one type.
_FIRST_ADDRESS = 0x7000_0000_0000 // LARGE_SEGMENT * LARGE_SEGMENT
_ADDRESS_SPACE = (
    1024**4 // LARGE_SEGMENT * LARGE_SEGMENT
)  # of an expandable segment: more than any device has


@dataclass
class AllocatorSettings:
    """How the allocator is set, as by PYTORCH_CUDA_ALLOC_CONF. Bytes.

    cap: that the segments may take in all; None: no end. by_fraction: the cap is one that
    `torch.cuda.set_per_process_memory_fraction` set, below the device's memory: a request is
    refused by the size of its own segment; an expandable segment may then grow past the cap by less
    than a page. Else it is the device's own end.
    """

    expandable: bool = False
    cap: int | None = None
    by_fraction: bool = False


class OutOfMemory(Exception):  # noqa: N818 - what it is called everywhere
    """No segment can be had, even after all unused ones were given back."""

    def __init__(self, requested: int, reserved: int, allocated: int, cap: int):
        super().__init__(
            f"{format_bytes(requested)} requested, {format_bytes(reserved)} of {format_bytes(cap)}"
            f" reserved, {format_bytes(allocated)} of it allocated"
        )


class CachingAllocator:
    """One device's allocator. Its numbers are those of `torch.cuda.memory_stats`, each with its
    peak since the last `reset_peaks`: `requested`; `allocated`, the blocks handed out; `active`,
    those and the freed ones that another stream may still use; `reserved`, all segments.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        place: Callable[[int, int], int | None] | None = None,
    ):
        """place: says where the device puts a segment of so many bytes for a stream (None: it does
        not know; they then ascend). Of two free blocks of one size the one with the lower address
        is taken, so it can matter.
        """
        self.settings = settings or AllocatorSettings()
        self.requested = self.allocated = self.active = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_active = self.peak_reserved = 0
        self.num_alloc_retries = 0
        self.log: list[tuple[str, int, int, int]] | None = (
            None  # (action, address, bytes, stream) if it is a list
        )
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._active: set[Block] = set()
        self._pending: dict[
            int, deque[tuple[int, Block]]
        ] = {}  # by stream, with what had been issued there when freed
        self._issued: Counter[int] = Counter()  # by stream, kernels
        self._place = place
        self._next_address = _FIRST_ADDRESS

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block for `num_bytes` > 0, to be used on `stream`; OutOfMemory if the cap leaves no
        room for it.
        """
        size = round_size(num_bytes)
        key = (size <= SMALL_SIZE, stream)
        pool = self._pools.get(key) or self._pools.setdefault(key, Pool(*key))
        block = self._reuse(pool, size) or self._grow(pool, size, num_bytes)
        excess = block.size - size
        if pool.small or self.settings.expandable:
            split = excess >= ROUNDING
        else:
            split = excess > SMALL_SIZE
        if split:
            pool.insert(split_block(block, size))
        block.allocated, block.requested = True, num_bytes
        self._active.add(block)
        self.requested += num_bytes
        self.allocated += block.size
        self.active += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        if self.log is not None:
            self.log.append(("alloc", block.address, num_bytes, stream))
        return block

    def free(self, block: Block) -> None:
        """Takes the block back; its own stream can reuse it at once, if `record_stream` did not
        name another.
        """
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        block.allocated = False
        self.allocated -= block.size
        if self.log is not None:
            self.log.append(("free_requested", block.address, block.requested, block.pool.stream))
        if not block.streams:
            self._complete_free(block)
            return
        for stream in block.streams:
            self._pending.setdefault(stream, deque()).append((self._issued[stream], block))
        block.pending, block.streams = len(block.streams), None

    def record_stream(self, block: Block, stream: int) -> None:
        """The block is used on `stream` too: once freed, it is not reused before that is done
        (`issue`, `finish`).
        """
        if stream != block.pool.stream:
            block.streams = (block.streams or set()) | {stream}

    def issue(self, stream: int, kernels: int = 1) -> None:
        """So many more kernels are issued on `stream`: what was issued `LAUNCH_QUEUE` before is
        done.
        """
        self._issued[stream] += kernels
        held, done = self._pending.get(stream), self._issued[stream] - LAUNCH_QUEUE
        while held and held[0][0] <= done:
            self._release(held.popleft()[1])

    def finish(self, stream: int) -> None:
        """All work that was issued on `stream` so far is done."""
        for _, block in self._pending.pop(stream, ()):
            self._release(block)

    def _release(self, block: Block) -> None:
        """One of the streams that a freed block waits for is done with it."""
        block.pending -= 1
        if not block.pending:
            self._complete_free(block)

    def empty_cache(self) -> None:
        """Waits for all streams and gives every segment, or page of one, that holds nothing back to
        the device.
        """
        for stream in list(self._pending):
            self.finish(stream)
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.small, pool.stream)):
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self.settings.expandable:
                    self._unmap(block)
                elif not block.previous and not block.next:
                    self._give_back(block)

    def reset_peaks(self) -> None:
        """Peaks are counted from what is held now."""
        self.peak_requested, self.peak_allocated = self.requested, self.allocated
        self.peak_active, self.peak_reserved = self.active, self.reserved

    def blocks(self) -> list[Block]:
        """Every block with memory, by address."""
        found = [
            block for pool in self._pools.values() for block in pool.blocks.values() if block.mapped
        ]
        return sorted([*found, *self._active], key=lambda block: block.address)

    def _reuse(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, taken from the pool (`get_free_block`)."""
        at = bisect_left(pool.free, (size, 0))
        if at == len(pool.free):
            return None
        block = pool.blocks[pool.free[at][1]]
        if self.settings.expandable:
            # A block that ends at unmapped addresses counts as large as it can grow, so that it is
            # taken last.
            while at + 1 < len(pool.free):
                other = pool.blocks[pool.free[at + 1][1]]
                if compute_growable_size(other) >= compute_growable_size(block):
                    break
                block, at = other, at + 1
        del pool.free[at], pool.blocks[block.address]
        return block

    def _grow(self, pool: Pool, size: int, requested: int) -> Block:
        """A block of a new segment; under a cap, after others were given back (`malloc`, where no
        block was found).
        """
        block = self._new_segment(pool, size)
        if not block:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._new_segment(pool, size)
        if block:
            return block
        if self.log is not None:
            self.log.append(("oom", 0, size, pool.stream))
        raise OutOfMemory(requested, self.reserved, self.allocated, self.settings.cap or 0)

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` from the device, or None if the cap does not allow it
        (`alloc_block`).
        """
        settings, segment = self.settings, compute_segment_size(size)
        if (settings.by_fraction or not settings.expandable) and self._exceeds(segment):
            return None
        if settings.expandable:
            return self._expand(pool, size)
        address = self._place(segment, pool.stream) if self._place else None
        if address is None:
            address = self._next_address
            self._next_address += segment
        self._count_reserved("segment_alloc", address, segment, pool.stream)
        return Block(address, segment, pool)

    def _exceeds(self, more: int) -> bool:
        return self.settings.cap is not None and self.reserved + more > self.settings.cap

    def _count_reserved(self, action: str, address: int, change: int, stream: int) -> None:
        self.reserved += change
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.log is not None:
            self.log.append((action, address, abs(change), stream))

    def _complete_free(self, block: Block) -> None:
        """The block can be reused: it joins its free neighbors (`free_block`)."""
        if self.log is not None:
            self.log.append(("free_completed", block.address, block.requested, block.pool.stream))
        self._active.remove(block)
        self.active -= block.size
        self.requested -= block.requested
        join_neighbors(block)
        block.pool.insert(block)

    def _give_back(self, block: Block) -> None:
        """A free block that is a whole segment goes back to the device (`release_block`)."""
        block.pool.remove(block)
        self._count_reserved("segment_free", block.address, -block.size, block.pool.stream)

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A block at the lowest addresses of the stream's expandable segment that are free or
        without memory and `size` long, given memory where it has none
        (`try_allocate_expandable_block`); None if there is no more.
        """
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "the room found is long enough"
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which has taken in the block before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """The first block of that room; a new segment's, if there is none
        (`find_expandable_block`).
        """
        for address in pool.unmapped:
            start = pool.blocks[address]
            if start.previous and start.previous.idle:
                start = start.previous
            length, block = 0, start
            while length < size and block.idle:
                length += block.size
                if not block.next:
                    break
                block = block.next
            if length >= size:
                return start
        room = Block(self._next_address, _ADDRESS_SPACE, pool, mapped=False)
        self._next_address += _ADDRESS_SPACE
        pool.insert(room)
        return room

    def _map(self, block: Block, size: int) -> bool:
        """Gives the first `size` bytes of an unmapped block memory, whole pages of it, and joins it
        to free neighbors (`map_block`); False if the device has no more.
        """
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if not self.settings.by_fraction and self._exceeds(size):
            return False
        self._count_reserved("segment_map", block.address, size, pool.stream)
        pool.remove(block)
        if size < block.size:
            pool.insert(split_block(block, size))
        block.mapped = True
        join_neighbors(block)
        block.pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages inside a free block back to the device (`unmap_block`)."""
        pool = block.pool
        begin = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        if block.address < begin:
            before, block = block, split_block(block, begin - block.address)
            pool.insert(before)
        if end < block.address + block.size:
            pool.insert(split_block(block, end - begin))
        block.mapped = False
        join_neighbors(block)
        if block.previous or block.next:
            pool.insert(block)  # else the segment is empty, and goes with its addresses
        self._count_reserved("segment_unmap", begin, begin - end, pool.stream)
