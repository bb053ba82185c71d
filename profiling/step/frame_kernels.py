# mypy: ignore-errors
"""The frame of the step in Triton: what lies between the kernels that are compared. Both arms run these.

They are plain one-token kernels that read their weights at a fair share of the memory bandwidth; nothing
here is a product of the project. `frame.py` launches them and holds the same functions in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_conv(x, state, weight, out, channels, BLOCK: tl.constexpr):
    """Four taps a channel; state [3, C], the last three inputs, is shifted by x [C]. out [C]: their silu."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    total = tl.load(x + c, inside).to(tl.float32) * tl.load(weight + 3 * channels + c, inside).to(tl.float32)
    new = tl.load(x + c, inside)
    for tap in tl.static_range(3):
        held = tl.load(state + tap * channels + c, inside)
        total += held.to(tl.float32) * tl.load(weight + tap * channels + c, inside).to(tl.float32)
        if tap > 0:
            tl.store(state + (tap - 1) * channels + c, held, inside)
    tl.store(state + 2 * channels + c, new, inside)
    tl.store(out + c, (total * tl.sigmoid(total)).to(out.dtype.element_ty), inside)


@triton.jit
def step_gated_norm(x, z, weight, out, eps, DIM: tl.constexpr):
    """A head a program: RMSNorm of x, times weight, times silu(z)."""
    d = tl.arange(0, DIM)
    at = tl.program_id(0) * DIM + d
    value = tl.load(x + at).to(tl.float32)
    gate = tl.load(z + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    result = value * scale * tl.load(weight + d).to(tl.float32) * gate * tl.sigmoid(gate)
    tl.store(out + at, result.to(out.dtype.element_ty))


@triton.jit
def step_route(logits, ids, weights, EXPERTS: tl.constexpr, TOP: tl.constexpr, PADDED: tl.constexpr):
    """The TOP largest logits, their softmax among themselves; after them the shared expert, which is
    EXPERTS."""
    e = tl.arange(0, EXPERTS)
    value = tl.load(logits + e).to(tl.float32)
    first = tl.max(value, 0)
    slot = tl.arange(0, PADDED)
    chosen = tl.zeros((PADDED,), tl.float32)
    names = tl.full((PADDED,), EXPERTS, tl.int32)
    for k in tl.static_range(TOP):
        best = tl.argmax(value, 0)
        chosen = tl.where(slot == k, tl.exp(tl.max(value, 0) - first), chosen)
        names = tl.where(slot == k, best, names)
        value = tl.where(e == best, float("-inf"), value)
    tl.store(ids + slot, names, slot <= TOP)
    tl.store(weights + slot, chosen / tl.sum(chosen, 0), slot < TOP)


@triton.jit
def step_expert_up(
    x, ids, weight, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Slot s, ROWS of its expert's WIDTH: silu(gate . x) * (up . x). weight [E, 2*WIDTH, HIDDEN]: gates,
    then ups."""
    slot = tl.program_id(0)
    expert = tl.load(ids + slot).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    base = weight + expert * (2 * WIDTH * HIDDEN)
    gate = tl.zeros((ROWS,), tl.float32)
    up = tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = (h < HIDDEN)[None, :]
        value = tl.load(x + h, h < HIDDEN, 0.0).to(tl.float32)[None, :]
        at = row[:, None] * HIDDEN + h[None, :]
        gate += tl.sum(tl.load(base + at, inside, 0.0).to(tl.float32) * value, 1)
        up += tl.sum(tl.load(base + WIDTH * HIDDEN + at, inside, 0.0).to(tl.float32) * value, 1)
    tl.store(out + slot * WIDTH + row, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty))


@triton.jit
def step_expert_down(
    x, ids, weight, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Slot s, ROWS of its expert's HIDDEN outputs from x [slots, WIDTH]. weight [E, HIDDEN, WIDTH]."""
    slot = tl.program_id(0)
    expert = tl.load(ids + slot).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, BLOCK)
    inside = w < WIDTH
    value = tl.load(x + slot * WIDTH + w, inside, 0.0).to(tl.float32)[None, :]
    at = expert * (HIDDEN * WIDTH) + row[:, None] * WIDTH + w[None, :]
    total = tl.sum(tl.load(weight + at, inside[None, :], 0.0).to(tl.float32) * value, 1)
    tl.store(out + slot * HIDDEN + row, total.to(out.dtype.element_ty))


@triton.jit
def step_qk_norm_rope(
    row, q_weight, k_weight, angles, q_out, keys, values, position, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """A head a program: HEADS of q, then k and v, which go to their caches. row: q heads, gates, k, v, DIM
    each."""
    head = tl.program_id(0)
    d = tl.arange(0, DIM)
    half: tl.constexpr = ROTARY // 2
    pair = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    source = row + tl.where(head < HEADS, head, HEADS + head) * DIM
    value = tl.load(source + d)
    if head == HEADS + 1:
        tl.store(values + position * DIM + d, value)
    else:
        weight = q_weight
        if head == HEADS:
            weight = k_weight
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
        mine = wide * scale * tl.load(weight + d).to(tl.float32)
        other = tl.load(source + pair).to(tl.float32) * scale * tl.load(weight + pair).to(tl.float32)
        angle = tl.load(angles + d % half)
        sign = tl.where(d < half, -1.0, 1.0)
        turned = tl.where(d < ROTARY, mine * tl.cos(angle) + sign * other * tl.sin(angle), mine)
        if head == HEADS:
            tl.store(keys + position * DIM + d, turned.to(keys.dtype.element_ty))
        else:
            tl.store(q_out + head * DIM + d, turned.to(q_out.dtype.element_ty))


@triton.jit
def step_attend(
    q, keys, values, length, part, top, total, scale,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SPAN keys a program, all heads of one key head: part [S, HEADS, DIM] fp32, top and total [S, HEADS]."""
    split = tl.program_id(0)
    h = tl.arange(0, PADDED)
    d = tl.arange(0, DIM)
    query = tl.load(q + h[:, None] * DIM + d[None, :], (h < HEADS)[:, None], 0.0)
    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    weight = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, DIM), tl.float32)
    for start in range(0, SPAN, BLOCK):
        n = split * SPAN + start + tl.arange(0, BLOCK)
        inside = n < length
        key = tl.load(keys + n[:, None] * DIM + d[None, :], inside[:, None], 0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        new = tl.maximum(highest, tl.max(score, 1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # nothing within the length yet
        shrink = tl.exp(highest - anchor)
        p = tl.exp(score - anchor[:, None])
        value = tl.load(values + n[:, None] * DIM + d[None, :], inside[:, None], 0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value)
        weight = weight * shrink + tl.sum(p, 1)
        highest = new
    kept = h < HEADS
    at = split * HEADS + h
    tl.store(part + at[:, None] * DIM + d[None, :], acc, kept[:, None])
    tl.store(top + at, highest, kept)
    tl.store(total + at, weight, kept)


@triton.jit
def step_attend_join(
    part, top, total, gate, out, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """A head a program: the splits together, times sigmoid(gate)."""
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM)
    highest = tl.load(top + s * HEADS + head)
    share = tl.exp(highest - tl.max(highest, 0))
    weight = tl.sum(tl.load(total + s * HEADS + head) * share, 0)
    acc = tl.load(part + (s * HEADS + head)[:, None] * DIM + d[None, :])
    value = tl.sum(acc * share[:, None], 0) / weight
    opened = tl.sigmoid(tl.load(gate + head * DIM + d).to(tl.float32))
    tl.store(out + head * DIM + d, (value * opened).to(out.dtype.element_ty))
