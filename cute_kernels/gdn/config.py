"""Launch geometry of the packed GDN decode, apart from its device code: plain Python, no compiler needed.

A head's state is Dv rows of Dk elements. Eight lanes own one row, so a warp walks the state four rows at a time
(one "step"). A CTA owns `value_tile` consecutive rows of one head: `warps * steps * 4` of them.
"""

LANES_PER_ROW = 8
ROWS_PER_STEP = 32 // LANES_PER_ROW

# value_tile -> (warps a CTA, steps a warp). The tile changes how rows are spread over CTAs, never how one row is summed.
GEOMETRY: dict[int, tuple[int, int]] = {4: (1, 1), 8: (2, 1), 16: (4, 1), 32: (4, 2), 64: (4, 4)}

VALUE_TILES: tuple[int, ...] = tuple(GEOMETRY)


def value_tile_for(rows: int, value_heads: int) -> int:
    """The value tile for a batch of `rows` rows with `value_heads` heads each.

    Few (row, head) pairs: small tiles, so that one state is spread over many SMs and the step stays latency bound.
    Many: large tiles, so that the work a CTA repeats (q, k, their norms) is shared by more state rows.
    """
    heads = rows * value_heads
    if heads <= 24:
        return 4
    if heads <= 96:
        return 8
    if heads <= 384:
        return 16
    return 32
