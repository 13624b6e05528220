"""Model torch's caching allocator for CUDA (its native backend), to tell what a run reserves.

`replay.replay` gives a `CachingAllocator` the allocations of a planned run, and reads its peaks. It
follows pytorch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, as torch 2.11 to
2.13 have them; docstrings name the C++ function that a method models, as in (`alloc_block`). A
segment is memory taken from the device at once; an expandable one takes it in pages.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from itertools import chain

from recipe_lib.units import MIB, format_bytes

# Not modeled: CUDA graphs' private pools, several threads, address space that runs out in
# expandable mode, and the settings `max_split_size`, `roundup_power2_divisions` and
# `garbage_collection_threshold`.

# Bytes, each with the name of torch's constant:
ROUNDING = 512  # kMinBlockSize: every block is a multiple of it
SMALL_SIZE = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: segments and pages of the small pool
# kLargeBuffer: pages of the large pool, and the segment of a request from 1 to 10 MiB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: requests from here on take a segment of their own size
SEGMENT_ROUNDING = 2 * MIB  # kRoundLarge: segments of such requests are rounded up to a multiple
# Kernels that the host can issue on a stream before its next launch waits for the first of them to
# end: about 1000, as measured in forums.developer.nvidia.com/t/68937. NVIDIA documents no number.
LAUNCH_QUEUE = 1024
# Above 2**32 like a device's addresses, so that programs that show snapshots of memory (those of
# `write_snapshot` in replay.py) read every address as one type of number.
_FIRST_ADDRESS = 0x7000_0000_0000 // LARGE_SEGMENT * LARGE_SEGMENT
# Bytes of addresses of an expandable segment: more than any device has memory, so that it never
# runs out of addresses.
_ADDRESS_SPACE = 1024**4 // LARGE_SEGMENT * LARGE_SEGMENT


def round_size(size: int) -> int:
    """Return the bytes of a block for `size` bytes (`round_size` in CUDACachingAllocator.cpp)."""
    return -(-size // ROUNDING) * ROUNDING


# eq=False: blocks are in a set here and keys of dicts in replay.py while their fields change, so
# that they are hashed by identity.
# repr=False: a block refers to its neighbors, so that a generated one would print all of them.
@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A piece of a segment, which `malloc` hands out."""

    address: int  # of its first byte
    size: int  # bytes
    pool: "Pool"  # where it goes back to when it is freed
    mapped: bool = True  # has memory; False: a part of an expandable segment with addresses only
    requested: int = 0  # bytes that `malloc` was asked for, before rounding
    allocated: bool = False  # handed out by `malloc`, and not yet given to `free`
    previous: "Block | None" = None  # the block before it in the segment; None: it is the first
    next: "Block | None" = None  # the block after it in the segment; None: it is the last
    streams: set[int] | None = None  # streams besides the pool's that use it (`record_stream`)
    num_pending_streams: int = 0  # once it is freed: how many of these may still use it

    @property
    def idle(self) -> bool:
        """Return True if the block is neither handed out nor still in use by a stream."""
        return not self.allocated and not self.num_pending_streams


class Pool:
    """The small or the large blocks of one stream that are free or have no memory."""

    __slots__ = "small", "stream", "page", "free", "unmapped", "blocks"

    def __init__(self, small: bool, stream: int):
        self.small = small  # for blocks up to SMALL_SIZE; else for larger ones
        self.stream = stream  # index of the stream that its blocks are allocated on
        # Bytes: an expandable segment takes and gives memory in multiples of it.
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []  # (size, address) of blocks with memory, sorted
        self.unmapped: list[int] = []  # addresses of blocks without memory, sorted
        self.blocks: dict[int, Block] = {}  # those of `free` and `unmapped`, by address

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
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
    """Return the bytes of a block and of the addresses after it that have no memory yet."""
    following = block.next
    return block.size + (following.size if following and not following.mapped else 0)


def split_block(block: Block, size: int) -> Block:
    """Leave a block its first `size` bytes, and return the rest as the block that follows it.

    Neither is put into the pool.
    """
    rest = Block(
        address=block.address + size,
        size=block.size - size,
        pool=block.pool,
        mapped=block.mapped,
        previous=block,
        next=block.next,
    )
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
    """Settings of the allocator: its segments (PYTORCH_CUDA_ALLOC_CONF) and its memory limit."""

    expandable: bool = False  # `expandable_segments`
    cap: int | None = None  # bytes that the segments may take in all; None: no limit
    # The cap is one that `torch.cuda.set_per_process_memory_fraction` set, below the device's
    # memory. A request is then refused by the size of its own segment, and an expandable segment
    # may grow past the cap by less than a page. False: the cap is the device's memory.
    by_fraction: bool = False


@dataclass
class MemoryPeaks:
    """Peaks in bytes as `torch.cuda.memory_stats` counts them, each at a moment of its own."""

    requested: int = 0  # asked for in `malloc` and not freed
    allocated: int = 0  # in the blocks handed out, which are rounded up
    active: int = 0  # in blocks handed out and in freed blocks that another stream may still use
    reserved: int = 0  # in all segments, taken from the device


class OutOfMemory(Exception):  # noqa: N818 - what it is called everywhere
    """The error of a request that the cap has no room for, with all unused segments given back.

    requested: bytes before rounding. reserved, allocated: of the allocator then. cap: its limit.
    """

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

        settings: None: the defaults. choose_address: `fn(num_bytes, stream)` returns the address at
        which the device puts a segment, or None for the next one in ascending order. Addresses can
        matter, since of two free blocks of one size the one with the lower address is taken.
        """
        self.settings = settings or AllocatorSettings()
        # Bytes now, as `MemoryPeaks` has them, and their peaks since the last `reset_peaks`.
        self.requested = self.allocated = self.active = self.reserved = 0
        self.peaks = MemoryPeaks()
        self.num_alloc_retries = 0  # times that unused segments were given back for a request
        # Entries (action, address, bytes, stream), with the actions of
        # `torch.cuda.memory._snapshot()["device_traces"]`. The deque drops them: set a list to keep
        # them.
        self.log: MutableSequence[tuple[str, int, int, int]] = deque(maxlen=0)
        self._pools: dict[tuple[bool, int], Pool] = {}  # by (is small, stream)
        self._active: set[Block] = set()  # handed out, or freed and still used by a stream
        # By stream, freed blocks that it may use still, the first one freed first: (kernels issued
        # on the stream when the block was freed, block).
        self._freed_in_use: dict[int, deque[tuple[int, Block]]] = {}
        self._num_issued: Counter[int] = Counter()  # by stream, kernels issued so far
        self._choose_address = choose_address
        self._next_address = _FIRST_ADDRESS

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for `num_bytes` > 0, to be used on the stream of this index.

        Raises OutOfMemory if the cap leaves no room for it.
        """
        size = round_size(num_bytes)
        key = (size <= SMALL_SIZE, stream)
        pool = self._pools.get(key) or self._pools.setdefault(key, Pool(*key))
        block = self._reuse(pool, size) or self._reserve_block(pool, size, num_bytes)
        # What is left over becomes a block of its own if it is large enough, as in `should_split`.
        # A large block of a segment that cannot grow keeps up to 1 MiB too much.
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
        """Take a block back, so that a later `malloc` on its own stream can reuse it at once.

        If `record_stream` named other streams, it can be reused only when these are done with it.
        Raises ValueError for a block that is not handed out.
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
            self._freed_in_use.setdefault(stream, deque()).append((self._num_issued[stream], block))
        block.num_pending_streams = len(block.streams)
        block.streams = None

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that a block is used on `stream` too; nothing is noted for the pool's own stream.

        Once freed, it is not reused before `issue` or `finish` says that the stream is done.
        """
        if stream != block.pool.stream:
            block.streams = (block.streams or set()) | {stream}

    def issue(self, stream: int, kernels: int = 1) -> None:
        """Count kernels issued on `stream`, and take all but the last `LAUNCH_QUEUE` as done.

        The host could not have issued these before. Blocks that were freed before a kernel that is
        done are no longer in use by this stream.
        """
        self._num_issued[stream] += kernels
        freed_blocks = self._freed_in_use.get(stream)
        num_done = self._num_issued[stream] - LAUNCH_QUEUE
        while freed_blocks and freed_blocks[0][0] <= num_done:
            self._count_stream_done(freed_blocks.popleft()[1])

    def finish(self, stream: int) -> None:
        """Note that the host has waited for `stream`: all work issued there so far is done."""
        for _, block in self._freed_in_use.pop(stream, ()):
            self._count_stream_done(block)

    def _count_stream_done(self, block: Block) -> None:
        block.num_pending_streams -= 1
        if not block.num_pending_streams:
            self._complete_free(block)

    def empty_cache(self) -> None:
        """Wait for all streams and give unused segments, or pages of them, back to the device."""
        for stream in list(self._freed_in_use):
            self.finish(stream)
        # Large pools first, as in `release_cached_blocks`; the streams in any fixed order.
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.small, pool.stream)):
            # A copy, since both calls below change `pool.free`.
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self.settings.expandable:
                    self._unmap(block)
                elif not block.previous and not block.next:
                    self._release_segment(block)

    def reset_peaks(self) -> None:
        self.peaks = MemoryPeaks(
            requested=self.requested,
            allocated=self.allocated,
            active=self.active,
            reserved=self.reserved,
        )

    def list_blocks(self) -> list[Block]:
        """Return every block with memory, free or not, in the order of addresses."""
        idle = chain.from_iterable(pool.blocks.values() for pool in self._pools.values())
        blocks = [*self._active, *(block for block in idle if block.mapped)]
        return sorted(blocks, key=lambda block: block.address)

    def _reuse(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block of at least `size` bytes from a pool (`get_free_block`).

        Return None if there is none.
        """
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
        pool.remove(block)
        return block

    def _reserve_block(self, pool: Pool, size: int, requested: int) -> Block:
        """Return a block of at least `size` bytes of memory newly taken from the device.

        If the cap has no room, unused segments are given back first. requested: bytes before
        rounding, for the error. Raises OutOfMemory if there is no room then either.
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
            requested=requested,
            reserved=self.reserved,
            allocated=self.allocated,
            cap=self.settings.cap or 0,
        )

    def _make_segment(self, pool: Pool, size: int) -> Block | None:
        """Return a block of at least `size` bytes from the device (`alloc_block`).

        Return None if the cap does not allow it.
        """
        settings = self.settings
        segment_size = compute_segment_size(size)
        if (settings.by_fraction or not settings.expandable) and self._would_exceed(segment_size):
            return None
        if settings.expandable:
            return self._expand(pool, size)
        address = self._choose_address(segment_size, pool.stream) if self._choose_address else None
        if address is None:
            address = self._next_address
            self._next_address += segment_size
        self._record_reserved(
            action="segment_alloc", address=address, change=segment_size, stream=pool.stream
        )
        return Block(address, segment_size, pool)

    def _would_exceed(self, num_bytes: int) -> bool:
        return self.settings.cap is not None and self.reserved + num_bytes > self.settings.cap

    def _record_reserved(self, *, action: str, address: int, change: int, stream: int) -> None:
        # change: bytes that were taken from the device; negative if they were given back.
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

    def _release_segment(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the device (`release_block`)."""
        block.pool.remove(block)
        self._record_reserved(
            action="segment_free",
            address=block.address,
            change=-block.size,
            stream=block.pool.stream,
        )

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Return a block of an expandable segment (`try_allocate_expandable_block`).

        Its addresses are the pool's lowest with `size` bytes that are free or have no memory; these
        are given memory. Return None if the cap leaves none.
        """
        block = self._find_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "the room is long enough"
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # `_map` has joined it with the block before it
        pool.remove(block)
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        """Return the first of neighboring idle blocks of together `size` bytes or more.

        It follows `find_expandable_block`. At least one of the blocks has no memory: a free block
        that is large enough alone was found before. If there are none, return a new segment.
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
        segment = Block(address=self._next_address, size=_ADDRESS_SPACE, pool=pool, mapped=False)
        self._next_address += _ADDRESS_SPACE
        pool.insert(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Give the first `size` bytes of an unmapped block memory, in whole pages (`map_block`).

        The block is joined with free neighbors then. Return False if the cap has no room.
        """
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if not self.settings.by_fraction and self._would_exceed(size):
            return False
        self._record_reserved(
            action="segment_map", address=block.address, change=size, stream=pool.stream
        )
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
        self._record_reserved(
            action="segment_unmap", address=begin, change=begin - end, stream=pool.stream
        )
