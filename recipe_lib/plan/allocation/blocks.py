"""Blocks of memory and the pools they wait in, for the model of CUDA's caching allocator (allocator.py)."""

from bisect import bisect_left, insort

from recipe_lib.units import MIB

ROUNDING = 512  # every block is a multiple of it
SMALL_SIZE = MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # segments and pages of the small pool
LARGE_SEGMENT = 20 * MIB  # pages of the large pool, and the segment of a request from 1 to 10 MiB
LARGE_REQUEST = 10 * MIB  # requests from here on take a segment of their own size
SEGMENT_ROUNDING = 2 * MIB  # which is a multiple of it
# Kernels of a stream that a host can have issued and that are not done: about 1000 for each stream, as measured in
# forums.developer.nvidia.com/t/68937; the next launch waits. No document of NVIDIA's has the number.
LAUNCH_QUEUE = 1024


def block_bytes(size: int) -> int:
    """What a block for so many bytes has at the least."""
    return -(-size // ROUNDING) * ROUNDING


class Block:
    """A piece of a segment; what `malloc` hands out.

    mapped: it has memory; a stretch of an expandable segment may have addresses only. previous, next: its neighbors in
    the segment. streams: others than its own that use it. pending: how many of them may still do so after it was freed.
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
    """The small or the large blocks of one stream that are free, by size and address, and those without memory."""

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


def round_size(num_bytes: int) -> int:
    """Bytes of the block for a request (`round_size` in CUDACachingAllocator.cpp)."""
    return max(ROUNDING, block_bytes(num_bytes))


def segment_size(size: int) -> int:
    """Bytes of a new segment for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


def growable_size(block: Block) -> int:
    """Bytes that the block has, with the addresses after it that have no memory yet."""
    following = block.next
    return block.size + (following.size if following and not following.mapped else 0)


def join_neighbors(block: Block) -> None:
    """A free block, not yet in its pool, takes in those before and after it that are free too; one without memory
    those without (`try_merge_blocks`)."""
    pool, before, after = block.pool, block.previous, block.next
    if before and not before.allocated and not before.pending and before.mapped == block.mapped:
        pool.remove(before)
        block.address, block.size, block.previous = before.address, block.size + before.size, before.previous
        if before.previous:
            before.previous.next = block
    if after and not after.allocated and not after.pending and after.mapped == block.mapped:
        pool.remove(after)
        block.size, block.next = block.size + after.size, after.next
        if after.next:
            after.next.previous = block


def check_blocks(blocks: list[Block], pools: list[Pool]) -> None:
    """AssertionError if blocks (all of them, by address) overlap, are wrongly linked, or are not in the pool where they
    belong, or if two of a kind lie side by side unmerged."""
    for block, above in zip(blocks, blocks[1:], strict=False):
        assert block.address + block.size <= above.address
    for block in blocks:
        assert block.size > 0 and block.size % ROUNDING == 0 and block.address % ROUNDING == 0
        assert (block.pool.blocks.get(block.address) is block) == block.idle
        assert not block.allocated or 0 < block.requested <= block.size
        assert block.mapped or block.idle and block.size % block.pool.page == 0
        if block.next:
            assert block.next.previous is block and block.address + block.size == block.next.address
            assert block.next.pool is block.pool
            assert not (block.idle and block.next.idle and block.mapped == block.next.mapped)
    for pool in pools:
        assert pool.free == sorted((block.size, at) for at, block in pool.blocks.items() if block.mapped)
        assert pool.unmapped == sorted(at for at, block in pool.blocks.items() if not block.mapped)
