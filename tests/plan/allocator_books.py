"""Check the state of `CachingAllocator`, the planner's model of torch's allocator.

`check_books(allocator)`, called between allocations, finds blocks that overlap, free neighbors that
are not merged, and wrong totals.
"""

from recipe_lib.plan.allocation.caching_allocator import ROUNDING, CachingAllocator


def check_books(allocator: CachingAllocator) -> None:
    """Raise AssertionError if the totals and free lists do not follow from the blocks."""
    mapped = allocator.list_blocks()  # blocks with memory of the device
    # Handed out, or freed while a stream may still use them.
    active = [block for block in mapped if not block.idle]
    assert sum(block.size for block in mapped) == allocator.reserved <= allocator.peaks.reserved
    assert sum(block.size for block in active) == allocator.active <= allocator.peaks.active
    assert (
        sum(block.requested for block in active) == allocator.requested <= allocator.peaks.requested
    )
    allocated_bytes = sum(block.size for block in mapped if block.allocated)
    assert allocated_bytes == allocator.allocated <= allocator.peaks.allocated
    settings = allocator.settings
    if settings.cap is not None and not (settings.by_fraction and settings.expandable):
        assert allocator.reserved <= settings.cap
    pools = {id(block.pool): block.pool for block in mapped}
    # Ranges of addresses without memory, of expandable segments.
    unmapped = [pool.blocks[address] for pool in pools.values() for address in pool.unmapped]
    blocks = sorted([*mapped, *unmapped], key=lambda block: block.address)
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
    for pool in pools.values():
        assert pool.free == sorted(
            (block.size, address) for address, block in pool.blocks.items() if block.mapped
        )
        assert pool.unmapped == sorted(
            address for address, block in pool.blocks.items() if not block.mapped
        )
