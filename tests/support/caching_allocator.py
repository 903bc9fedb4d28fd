"""The rules of torch's caching allocator for GPUs, and a recorder of a step's allocations to replay through them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.memory_meters import StorageWatcher

MIB = 2**20
FREED = -1


class AllocationRecorder(StorageWatcher):
    """What torch's operations allocate and free: (number of the storage, bytes or FREED), in order."""

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
    """A part of a segment; its neighbours are the parts before and after it."""

    size: int
    large: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


@dataclass
class CachingAllocator:
    """Best fit in two pools, without expandable segments (c10/cuda/CUDACachingAllocator.cpp).

    Up to 1 MiB: multiples of 512 bytes from segments of 2 MiB. Larger: from segments of 20 MiB, and from 10 MiB on from
    segments of their own size, rounded up to 2 MiB. A block is split if more than 512 bytes, or 1 MiB, are left over.
    """

    reserved: int = 0
    blocks: dict[int, _Block] = field(default_factory=dict)
    unused: list[_Block] = field(default_factory=list)

    def allocate(self, number: int, size: int) -> None:
        """Allocate a tensor of `size` bytes."""
        size = max(512, -(-size // 512) * 512)
        large = size > MIB
        fitting = [block for block in self.unused if block.large == large and block.size >= size]
        block = min(fitting, key=lambda one: one.size) if fitting else self._segment(size, large)
        if fitting:
            self.unused.remove(block)
        block.free = False
        left = block.size - size
        if left > MIB if large else left >= 512:
            rest = _Block(left, large, block, block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self.unused.append(rest)
        self.blocks[number] = block

    def free(self, number: int) -> None:
        """Free a tensor and merge its block with free neighbours. Ignore a tensor from before the first event."""
        block = self.blocks.pop(number, None)
        if block is None:
            return
        if block.before is not None and block.before.free:
            self.unused.remove(block.before)
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            self.unused.remove(block.after)
            block = self._merge(block, block.after)
        block.free = True
        self.unused.append(block)

    def _segment(self, size: int, large: bool) -> _Block:
        segment = 2 * MIB if not large else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += segment
        return _Block(segment, large)

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        return first


def replay(events: list[tuple[int, int]], scale: int) -> tuple[int, int]:
    """Return the peak of all tensors and the bytes that the allocator reserves, with every size times `scale`."""
    allocator, live, peak, sizes = CachingAllocator(), 0, 0, dict[int, int]()
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
