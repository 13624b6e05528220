"""A model of CUDA's caching allocator (torch's native backend): what it reserves for a run.

`CachingAllocator.malloc` and `free` follow pytorch's c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h, as torch 2.11 to 2.13 have them. Not modeled: CUDA graphs' private
pools, several threads, address space that runs out in expandable mode, and the settings
`max_split_size`, `roundup_power2_divisions` and `garbage_collection_threshold`.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

from recipe_lib.units import MIB, format_bytes

ROUNDING = 512  # every block is a multiple of it
SMALL_SIZE = MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # segments and pages of the small pool
LARGE_SEGMENT = 20 * MIB  # pages of the large pool, and the segment of a request from 1 to 10 MiB
LARGE_REQUEST = 10 * MIB  # requests from here on take a segment of their own size
SEGMENT_ROUNDING = 2 * MIB  # which is a multiple of it
# Kernels that a host can issue on a stream before the next launch waits for the first to be done:
# about 1000, as measured in forums.developer.nvidia.com/t/68937. No document of NVIDIA's has the
# number.
LAUNCH_QUEUE = 1024
# Like a device's: above 32 bits, so that viewers read every address as one type.
_FIRST_ADDRESS = 0x7000_0000_0000 // LARGE_SEGMENT * LARGE_SEGMENT
# Of an expandable segment: more than any device has.
_ADDRESS_SPACE = 1024**4 // LARGE_SEGMENT * LARGE_SEGMENT


def round_size(size: int) -> int:
    """Return the bytes of a block for `size` bytes (`round_size` in CUDACachingAllocator.cpp)."""
    return -(-size // ROUNDING) * ROUNDING


@dataclass(slots=True, eq=False, repr=False)  # known by identity, as a key of dicts
class Block:
    """A piece of a segment, which `malloc` hands out."""

    address: int
    size: int  # bytes
    pool: "Pool"
    # It has memory; a stretch of an expandable segment may have addresses only.
    mapped: bool = True
    requested: int = 0  # bytes that `malloc` was asked for
    allocated: bool = False
    previous: "Block | None" = None  # its neighbors in the segment
    next: "Block | None" = None
    streams: set[int] | None = None  # others than its own that use it
    pending: int = 0  # how many of them may still do so after it was freed

    @property
    def idle(self) -> bool:
        """Neither handed out nor still in use by a stream."""
        return not self.allocated and not self.pending


class Pool:
    """The small or the large blocks of one stream that are free or have no memory."""

    __slots__ = "small", "stream", "page", "free", "unmapped", "blocks"

    def __init__(self, small: bool, stream: int):
        self.small = small
        self.stream = stream
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT  # bytes
        self.free: list[tuple[int, int]] = []  # (size, address) of blocks with memory, sorted
        self.unmapped: list[int] = []  # addresses of blocks without memory, sorted
        self.blocks: dict[int, Block] = {}  # all of them, by address

    def insert(self, block: Block) -> None:
        """Add a block that is free, or has no memory."""
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a block of the pool."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.blocks[block.address]


def compute_segment_size(size: int) -> int:
    """Return the bytes of a new segment for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return (
        LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
    )


def compute_growable_size(block: Block) -> int:
    """Return a block's bytes with the addresses after it that have no memory yet."""
    following = block.next
    return block.size + (following.size if following and not following.mapped else 0)


def split_block(block: Block, size: int) -> Block:
    """Leave a block its first `size` bytes, and return the rest as the block that follows it."""
    rest = Block(block.address + size, block.size - size, block.pool, mapped=block.mapped)
    rest.previous = block
    rest.next = block.next
    if block.next:
        block.next.previous = rest
    block.next = rest
    block.size = size
    return rest


def join_neighbors(block: Block) -> None:
    """Join a free block, not yet in its pool, with free neighbors (`try_merge_blocks`).

    A block without memory is joined with those without.
    """
    before = block.previous
    after = block.next
    if before and before.idle and before.mapped == block.mapped:
        block.pool.remove(before)
        block.address = before.address
        block.size += before.size
        block.previous = before.previous
        if before.previous:
            before.previous.next = block
    if after and after.idle and after.mapped == block.mapped:
        block.pool.remove(after)
        block.size += after.size
        block.next = after.next
        if after.next:
            after.next.previous = block


@dataclass
class AllocatorSettings:
    """Settings of the allocator, as by PYTORCH_CUDA_ALLOC_CONF."""

    expandable: bool = False  # `expandable_segments`
    cap: int | None = None  # bytes that the segments may take in all; None: no end
    # The cap is one that `torch.cuda.set_per_process_memory_fraction` set, below the device's
    # memory. A request is then refused by the size of its own segment, and an expandable segment
    # may grow past the cap by less than a page. Else the cap is the device's own end.
    by_fraction: bool = False


@dataclass
class MemoryPeaks:
    """Peaks in bytes, each for itself, as `torch.cuda.memory_stats` counts them."""

    requested: int = 0  # asked for and not given back
    allocated: int = 0  # in the blocks handed out for it
    active: int = 0  # in those and in freed blocks that another stream may still use
    reserved: int = 0  # in all segments, taken from the device


class OutOfMemory(Exception):  # noqa: N818 - what it is called everywhere
    """No segment can be had, even after all unused ones were given back."""

    def __init__(self, requested: int, reserved: int, allocated: int, cap: int):
        super().__init__(
            f"{format_bytes(requested)} requested, {format_bytes(reserved)} of {format_bytes(cap)}"
            f" reserved, {format_bytes(allocated)} of it allocated"
        )


class CachingAllocator:
    """One device's allocator. Its byte counts are those of `torch.cuda.memory_stats`."""

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        choose_address: Callable[[int, int], int | None] | None = None,
    ):
        """Make an allocator that has reserved nothing.

        choose_address: `fn(bytes, stream)` returns the address at which the device puts a segment,
        or None, where it does not know; they then ascend. It can matter, since of two free blocks
        of one size the one with the lower address is taken.
        """
        self.settings = settings or AllocatorSettings()
        # Bytes now, as `MemoryPeaks` has them, and their peaks since the last `reset_peaks`.
        self.requested = self.allocated = self.active = self.reserved = 0
        self.peaks = MemoryPeaks()
        self.num_alloc_retries = 0
        # Entries (action, address, bytes, stream); none are kept unless the caller sets a list.
        self.log: MutableSequence[tuple[str, int, int, int]] = deque(maxlen=0)
        self._pools: dict[tuple[bool, int], Pool] = {}  # by (is small, stream)
        self._active: set[Block] = set()
        # By stream, (kernels issued there when the block was freed, block).
        self._pending: dict[int, deque[tuple[int, Block]]] = {}
        self._issued: Counter[int] = Counter()  # by stream, kernels
        self._choose_address = choose_address
        self._next_address = _FIRST_ADDRESS

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for `num_bytes` > 0, to be used on `stream`.

        Raises OutOfMemory if the cap leaves no room for it.
        """
        size = round_size(num_bytes)
        key = (size <= SMALL_SIZE, stream)
        pool = self._pools.get(key) or self._pools.setdefault(key, Pool(*key))
        block = self._reuse(pool, size) or self._grow(pool, size, num_bytes)
        # What is left over becomes a block of its own; a large block of a fixed segment keeps up to
        # 1 MiB of it.
        least_split = ROUNDING if pool.small or self.settings.expandable else SMALL_SIZE + 1
        if block.size - size >= least_split:
            pool.insert(split_block(block, size))
        block.allocated = True
        block.requested = num_bytes
        self._active.add(block)
        self.requested += num_bytes
        self.allocated += block.size
        self.active += block.size
        self.peaks.requested = max(self.peaks.requested, self.requested)
        self.peaks.allocated = max(self.peaks.allocated, self.allocated)
        self.peaks.active = max(self.peaks.active, self.active)
        self.log.append(("alloc", block.address, num_bytes, stream))
        return block

    def free(self, block: Block) -> None:
        """Take a block back; its own stream can reuse it at once.

        If `record_stream` named another stream, only when that is done.
        """
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        block.allocated = False
        self.allocated -= block.size
        self.log.append(("free_requested", block.address, block.requested, block.pool.stream))
        if not block.streams:
            self._complete_free(block)
            return
        for stream in block.streams:
            self._pending.setdefault(stream, deque()).append((self._issued[stream], block))
        block.pending = len(block.streams)
        block.streams = None

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that a block is used on `stream` too.

        Once freed, it is not reused before that stream is done with it (`issue`, `finish`).
        """
        if stream != block.pool.stream:
            block.streams = (block.streams or set()) | {stream}

    def issue(self, stream: int, kernels: int = 1) -> None:
        """Count kernels issued on `stream`: those issued `LAUNCH_QUEUE` before are done."""
        self._issued[stream] += kernels
        pending = self._pending.get(stream)
        num_done = self._issued[stream] - LAUNCH_QUEUE
        while pending and pending[0][0] <= num_done:
            self._release(pending.popleft()[1])

    def finish(self, stream: int) -> None:
        """Take all work that was issued on `stream` so far as done."""
        for _, block in self._pending.pop(stream, ()):
            self._release(block)

    def _release(self, block: Block) -> None:
        """Note that one of the streams that a freed block waits for is done with it."""
        block.pending -= 1
        if not block.pending:
            self._complete_free(block)

    def empty_cache(self) -> None:
        """Wait for all streams and give unused segments, or pages of them, back to the device."""
        for stream in list(self._pending):
            self.finish(stream)
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.small, pool.stream)):
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self.settings.expandable:
                    self._unmap(block)
                elif not block.previous and not block.next:
                    self._give_back(block)

    def reset_peaks(self) -> None:
        """Count peaks from what is held now."""
        self.peaks = MemoryPeaks(
            self.requested, allocated=self.allocated, active=self.active, reserved=self.reserved
        )

    def list_blocks(self) -> list[Block]:
        """Return every block with memory, by address."""
        blocks = list(self._active)
        for pool in self._pools.values():
            blocks += [block for block in pool.blocks.values() if block.mapped]
        return sorted(blocks, key=lambda block: block.address)

    def _reuse(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough from a pool (`get_free_block`)."""
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free):
            return None
        block = pool.blocks[pool.free[index][1]]
        if self.settings.expandable:
            # A block that ends at unmapped addresses counts as large as it can grow, so that it is
            # taken last.
            while index + 1 < len(pool.free):
                next_block = pool.blocks[pool.free[index + 1][1]]
                if compute_growable_size(next_block) >= compute_growable_size(block):
                    break
                block = next_block
                index += 1
        del pool.free[index], pool.blocks[block.address]
        return block

    def _grow(self, pool: Pool, size: int, requested: int) -> Block:
        """Return a block of a new segment (`malloc`, where no block was found).

        Under a cap, other segments are given back for it.
        """
        block = self._make_segment(pool, size)
        if not block:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._make_segment(pool, size)
        if block:
            return block
        self.log.append(("oom", 0, size, pool.stream))
        raise OutOfMemory(
            requested,
            reserved=self.reserved,
            allocated=self.allocated,
            cap=self.settings.cap or 0,
        )

    def _make_segment(self, pool: Pool, size: int) -> Block | None:
        """Return a block of at least `size` from the device (`alloc_block`).

        None if the cap does not allow it.
        """
        settings = self.settings
        segment = compute_segment_size(size)
        if (settings.by_fraction or not settings.expandable) and self._would_exceed(segment):
            return None
        if settings.expandable:
            return self._expand(pool, size)
        address = self._choose_address(segment, pool.stream) if self._choose_address else None
        if address is None:
            address = self._next_address
            self._next_address += segment
        self._count_reserved("segment_alloc", address, change=segment, stream=pool.stream)
        return Block(address, segment, pool)

    def _would_exceed(self, more: int) -> bool:
        return self.settings.cap is not None and self.reserved + more > self.settings.cap

    def _count_reserved(self, action: str, address: int, *, change: int, stream: int) -> None:
        self.reserved += change
        self.peaks.reserved = max(self.peaks.reserved, self.reserved)
        self.log.append((action, address, abs(change), stream))

    def _complete_free(self, block: Block) -> None:
        """Put a freed block, joined with its free neighbors, back into its pool (`free_block`)."""
        self.log.append(("free_completed", block.address, block.requested, block.pool.stream))
        self._active.remove(block)
        self.active -= block.size
        self.requested -= block.requested
        join_neighbors(block)
        block.pool.insert(block)

    def _give_back(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the device (`release_block`)."""
        block.pool.remove(block)
        self._count_reserved(
            "segment_free", block.address, change=-block.size, stream=block.pool.stream
        )

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Return a block of an expandable segment (`try_allocate_expandable_block`).

        It is at the lowest addresses of the stream's segment that are free or without memory and
        `size` long, and is given memory where it has none. None if the device has no more.
        """
        block = self._find_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "the room is long enough"
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # which has taken in the block before it
        pool.remove(block)
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        """Return the first block of addresses that are `size` long (`find_expandable_block`).

        It is a new segment's if there are none.
        """
        for address in pool.unmapped:
            start = pool.blocks[address]
            if start.previous and start.previous.idle:
                start = start.previous
            length = 0
            block: Block | None = start
            while length < size and block and block.idle:
                length += block.size
                block = block.next
            if length >= size:
                return start
        room = Block(self._next_address, _ADDRESS_SPACE, pool, mapped=False)
        self._next_address += _ADDRESS_SPACE
        pool.insert(room)
        return room

    def _map(self, block: Block, size: int) -> bool:
        """Give the first `size` bytes of an unmapped block memory, in whole pages (`map_block`).

        Return False if the device has no more.
        """
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if not self.settings.by_fraction and self._would_exceed(size):
            return False
        self._count_reserved("segment_map", block.address, change=size, stream=pool.stream)
        pool.remove(block)
        if size < block.size:
            pool.insert(split_block(block, size))
        block.mapped = True
        join_neighbors(block)
        block.pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside a free block back to the device (`unmap_block`)."""
        pool = block.pool
        begin = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        # What does not fill a page keeps its memory, at either end.
        if block.address < begin:
            before = block
            block = split_block(before, begin - before.address)
            pool.insert(before)
        if end < block.address + block.size:
            pool.insert(split_block(block, end - begin))
        block.mapped = False
        join_neighbors(block)
        if block.previous or block.next:
            pool.insert(block)  # else the segment is empty, and goes with its addresses
        self._count_reserved("segment_unmap", begin, change=begin - end, stream=pool.stream)
