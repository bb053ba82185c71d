"""Geometry of the HC mix: which CTA owns which weights, and where they lie in shared memory. Plain Python:
guards and the workspace on the host follow from it as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SLAB = 64
"""Elements of K in a slab: 128 bytes, one row of the widest swizzle."""

LAUNCHES = ("cooperative", "unguarded", "split")
"""cooperative: one launch, which the device refuses where not all CTAs can be resident. unguarded: the same
without asking the device: for a profiler that cannot run a cooperative launch, and has the device for itself.
split: two launches, for any number of SMs that holds a cluster."""

BUCKETS = (8, 16, 32)
"""Rows are padded to these: the columns N of the MMA. One kernel each."""

STREAMS = (1, 2, 4, 8)

MAX_SMEM = 227 * 1024

CTAS = 120
"""CTAs of the grid, at most, each with an SM of its own at the model's shapes: of clusters of eight such CTAs
an H200 holds 15. A device whose SMs lie otherwise may hold fewer, and refuses. 128 CTAs, some of which share
an SM, end later: the SMs that hold two of them have twice as much to take in."""

POISON, RECORD, LIMIT = 0, 1, 2
"""Words of the workspace behind `MixPlan.control`. POISON: not 0 once a wait has expired. RECORD: the address
of 32 bits that the host reads, which then get the number, counted from 1, of a CTA that was missing; 0 for no
such place. LIMIT: the nanoseconds that a CTA waits, 0 for WAIT_NS."""

WAIT_NS = 10**10


def bucket_of(rows: int) -> int:
    """The bucket that serves a call of 1 to 32 rows."""
    return next(b for b in BUCKETS if rows <= b)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class MixPlan:
    """hidden, streams, low_rank: the operator's H, C, R. bucket: columns N, at least T. tensor_memory: the
    MMA is SM100's. cluster: CTAs that split K of the down projection. groups: clusters; each owns `down_rows`
    rows of w_down. CTA i owns the hidden elements [i * up_hidden, (i + 1) * up_hidden) of every stream.
    """

    hidden: int
    streams: int
    low_rank: int
    bucket: int
    tensor_memory: bool
    cluster: int
    groups: int
    down_rows: int
    up_hidden: int

    @property
    def width(self) -> int:
        return self.streams * self.hidden

    @property
    def grid(self) -> int:
        return self.groups * self.cluster

    @property
    def warps(self) -> int:
        """SM100: four that empty tensor memory, one that issues the MMA, one that issues the copies. SM90: at
        the model's shapes two for each tile of the up projection. More of them start later than they save."""
        return 6 if self.tensor_memory else 12

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Columns whose inner activation a CTA of a cluster finishes."""
        return self.bucket // self.cluster

    @property
    def down_slabs(self) -> int:
        """Slabs of K that a CTA reads of its rows of w_down."""
        return self.width // (SLAB * self.cluster)

    @property
    def down_stride(self) -> int:
        """Rows from one slab of w_down to the next. SM100's descriptors want slabs at multiples of 1024
        bytes."""
        return _round_up(self.down_rows, 8) if self.tensor_memory else self.down_rows

    @property
    def up_slabs(self) -> int:
        return -(-self.low_rank // SLAB)

    @property
    def up_rows(self) -> int:
        """Rows of w_up that a CTA owns: row c * up_hidden + h."""
        return self.streams * self.up_hidden

    @property
    def staged(self) -> bool:
        """Whether the activations pass through shared memory; else each warp loads its fragments."""
        return self.tensor_memory or self.bucket > 8

    @property
    def x_box(self) -> int:
        """Slabs in one copy of the activations."""
        return max(n for n in range(1, 9) if self.down_slabs % n == 0)

    @property
    def x_boxes(self) -> int:
        return self.down_slabs // self.x_box

    @property
    def splits(self) -> int:
        """Partial sums of the down projection in a CTA: one a warp that has slabs, one in tensor memory."""
        return 1 if self.tensor_memory else min(self.warps, self.down_slabs)

    @property
    def up_tiles(self) -> int:
        """MMA tiles of the up projection: M = 64 on SM100, else 16."""
        return -(-self.up_rows // (64 if self.tensor_memory else 16))

    @property
    def up_steps(self) -> int:
        """Steps of K = 16 of the up projection."""
        return self.low_rank // 16

    @property
    def parts(self) -> int:
        """Parts of K of the up projection, each a warp's."""
        if self.tensor_memory:
            return 1
        most = max(1, self.warps // self.up_tiles)
        return max(k for k in range(1, most + 1) if self.up_steps % k == 0)

    # Shared memory. The weights of the down projection are done with when its sums are written: from there on
    # `pool` holds the sums and the inner activations.

    @property
    def part_stride(self) -> int:
        """fp32 elements from one column of a partial sum to the next."""
        return self.down_rows

    @property
    def sum_stride(self) -> int:
        """fp32 elements from one column of the up sums to the next: four more than a multiple of 16, which
        spreads the fragments over the banks."""
        return self.up_rows + 4

    @property
    def inner_offset(self) -> int:
        """Bytes of the pool before the inner activations."""
        part = self.splits * self.bucket * self.part_stride * 4
        sums = self.parts * self.bucket * self.sum_stride * 4
        return _round_up(max(part, sums), 1024)

    @property
    def inner_bytes(self) -> int:
        return self.up_slabs * self.bucket * SLAB * 2

    @property
    def pool_bytes(self) -> int:
        weights = self.down_slabs * self.down_stride * SLAB * 2
        return _round_up(max(weights, self.inner_offset + self.inner_bytes), 1024)

    @property
    def up_bytes(self) -> int:
        return self.up_slabs * self.up_rows * SLAB * 2

    @property
    def x_bytes(self) -> int:
        return self.down_slabs * self.bucket * SLAB * 2 if self.staged else 0

    @property
    def tail_bytes(self) -> int:
        """What an MMA of 64 rows may read past the last rows of a slab."""
        return 64 * SLAB * 2 if self.tensor_memory else 0

    @property
    def received_bytes(self) -> int:
        return self.cluster * self.columns * self.down_rows * 4

    @property
    def smem_bytes(self) -> int:
        """A CTA's shared memory, as mix.py lays it out; what stands before the barriers ends at multiples of
        their alignment."""
        barriers = 8 * (self.down_slabs + 4 + self.x_boxes)
        weights = self.pool_bytes + self.up_bytes
        return weights + self.x_bytes + self.tail_bytes + self.received_bytes + barriers + 4

    @property
    def words(self) -> int:
        """64-bit words that carry the inner activations of a row: two values and the epoch."""
        return self.low_rank // 2

    @property
    def control(self) -> int:
        """64-bit words of the workspace before the line of POISON and the others: a 32-bit epoch a CTA, in
        whole lines."""
        return _round_up(self.grid, 32) // 2

    @property
    def header_words(self) -> int:
        """64-bit words of the workspace before the activations."""
        return self.control + 16

    @property
    def workspace_words(self) -> int:
        """64-bit words of the workspace. One that served another plan does not serve: its epochs differ."""
        return self.header_words + self.bucket * self.words


def _shaped(
    hidden: int, streams: int, low_rank: int, bucket: int, tensor_memory: bool, cluster: int
) -> MixPlan:
    down_rows = 2 * -(-low_rank // (2 * (CTAS // cluster)))
    groups = -(-low_rank // down_rows)
    step = 16 // streams
    up_hidden = _round_up(-(-hidden // (groups * cluster)), step)
    return MixPlan(hidden, streams, low_rank, bucket, tensor_memory, cluster, groups, down_rows, up_hidden)


@lru_cache(maxsize=256)
def plan(hidden: int, streams: int, low_rank: int, bucket: int, target: str) -> MixPlan | str:
    """The geometry for a shape and a bucket, or why there is none, in words."""
    tensor_memory = target != "sm_90a"
    width = streams * hidden
    if streams not in STREAMS:
        return f"C must be one of {', '.join(map(str, STREAMS))}"
    if hidden % 8:
        return "H must be a multiple of 8"
    if low_rank % 16:
        return "R must be a multiple of 16"
    cluster = next((c for c in (8, 4, 2, 1) if width % (SLAB * c) == 0), None)
    if cluster is None:
        return f"C*H must be a multiple of {SLAB}"
    shaped = _shaped(hidden, streams, low_rank, bucket, tensor_memory, cluster)
    fits = shaped.up_tiles <= (4 if tensor_memory else shaped.warps) and shaped.down_rows <= 64
    if fits and max(shaped.up_rows, shaped.down_rows) <= 256 and shaped.smem_bytes <= MAX_SMEM:
        return shaped
    return f"a CTA's share of the weights fits {MAX_SMEM} bytes of shared memory"
