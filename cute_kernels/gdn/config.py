"""Launch geometry of the packed GDN decode, apart from its device code: plain Python, no compiler needed.

A head's state is D value rows of D keys. A warp owns four consecutive rows; a CTA owns `value_tile` of
them, so it has value_tile / 4 warps. The tile says how rows are spread over CTAs, never how one row is
summed.
"""

ROWS_PER_WARP = 4
VALUE_TILES: tuple[int, ...] = (4, 8, 16, 32)


def value_tile_for(rows: int, value_heads: int) -> int:
    """The value tile for a batch of `rows` rows with `value_heads` heads each.

    One row: 16, where latency is all and a CTA's warps share the lines of q, k and v. More: 8, the smallest
    that the rate at which CTAs start does not bound; smaller CTAs keep the memory pipe fuller.
    """
    return 16 if rows * value_heads <= 48 else 8
