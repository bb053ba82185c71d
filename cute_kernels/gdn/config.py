"""Launch geometry of the packed GDN decode, apart from its device code: plain Python, no compiler needed.

A head's state is D value rows of D keys. A CTA owns `value_tile` consecutive rows, a warp ROWS_PER_WARP of
them. The tile says how rows are spread over warps and CTAs, never how one row is summed.
"""

# value_tile -> rows a warp
ROWS_PER_WARP: dict[int, int] = {8: 8, 16: 8, 32: 4}
VALUE_TILES: tuple[int, ...] = tuple(ROWS_PER_WARP)


def value_tile_for(rows: int, value_heads: int) -> int:
    """The value tile for a batch of `rows` rows with `value_heads` heads each.

    Few: 32, eight warps of four rows: the step is as short as its chain of latencies, and the warps of
    a CTA share the lines of q, k and v. More: 16, two warps of eight rows, so that what a warp repeats
    is shared by more rows. Many: 8, CTAs of one warp, which come and go without waiting for each other.
    Measured on an H200.
    """
    heads = rows * value_heads
    return 32 if heads <= 96 else 16 if heads <= 1024 else 8
