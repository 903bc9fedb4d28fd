"""The rules of torch's caching allocator for GPUs, and a recorder of a step's allocations to replay
through them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.memory_meters import StorageWatcher

MIB = 2**20
FREED = -1


class AllocationRecorder(StorageWatcher):
    """What torch's operations allocate and free: (number of the storage, bytes or FREED), in
    order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []

    def made(self, number: int, size: int) -> None:
        """Record an allocation."""
        self.events.append((number, size))

    def freed(self, number: int, size: int) -> None:
        """Record that a storage was freed."""
        self.events.append((number, FREED))


@dataclass(eq=False)
class _Block:
    """A part of a pool's range of addresses. owner: the number of its tensor, or FREED."""

    owner: int
    size: int


@dataclass
class CachingAllocator:
    """Best fit with expandable segments (c10/cuda/CUDACachingAllocator.cpp), which no shortage
    makes give pages back.

    Up to 1 MiB: multiples of 512 bytes from a range of addresses that grows by pages of 2 MiB.
    Larger: from one that grows by pages of 20 MiB. Its last block can grow, so it is the last to be
    split. A block is split if more than 512 bytes, or 1 MiB, are left over.
    """

    reserved: int = 0
    small: list[_Block] = field(default_factory=list)
    large: list[_Block] = field(default_factory=list)

    def allocate(self, number: int, size: int) -> None:
        """Allocate a tensor of `size` bytes."""
        size = max(512, -(-size // 512) * 512)
        is_large = size > MIB
        blocks = self.large if is_large else self.small
        fitting = [block for block in blocks if block.owner == FREED and block.size >= size]
        block = (
            min(fitting, key=lambda one: (one is blocks[-1], one.size))
            if fitting
            else self._grown(blocks, size)
        )
        left = block.size - size
        if left > MIB if is_large else left >= 512:
            blocks.insert(blocks.index(block) + 1, _Block(FREED, left))
            block.size = size
        block.owner = number

    def free(self, number: int) -> None:
        """Free a tensor and merge its block with free neighbours. Ignore a tensor from before the
        first event."""
        for blocks in (self.small, self.large):
            for place, block in enumerate(blocks):
                if block.owner == number:
                    block.owner = FREED
                    around = [
                        one for one in blocks[max(0, place - 1) : place + 2] if one.owner == FREED
                    ]
                    around[0].size = sum(one.size for one in around)
                    blocks[:] = [one for one in blocks if one not in around[1:]]
                    return

    def _grown(self, blocks: list[_Block], size: int) -> _Block:
        """Return the last block, with enough pages for a tensor."""
        if not blocks or blocks[-1].owner != FREED:
            blocks.append(_Block(FREED, 0))
        page = 20 * MIB if blocks is self.large else 2 * MIB
        more = -(-(size - blocks[-1].size) // page) * page
        blocks[-1].size += more
        self.reserved += more
        return blocks[-1]


def replay(events: list[tuple[int, int]], scale: int) -> tuple[int, int]:
    """Return the peak of all tensors and the bytes that the allocator reserves, with every size
    times `scale`."""
    allocator = CachingAllocator()
    live = 0
    peak = 0
    sizes = dict[int, int]()
    for number, size in events:
        if size == FREED:
            live -= sizes.pop(number, 0)
            allocator.free(number)
        else:
            sizes[number] = size * scale
            live += size * scale
            peak = max(peak, live)
            allocator.allocate(number, size * scale)
    return peak, allocator.reserved
