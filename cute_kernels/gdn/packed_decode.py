"""Packed single-token GDN decode: one step of the gated delta rule, state updated in place.

For row b, value head h, key head h // (Hv/Hk), with S = state[state_indices[b], h] (D value rows of D keys), in fp32:

    q = q * rsqrt(sum(q^2) + 1e-6) * scale       k = k * rsqrt(sum(k^2) + 1e-6)
    S = S * exp(-exp(A_log) * softplus(a + dt_bias))
    d = (v - S k) * sigmoid(b)                    one value a state row
    S = S + d k^T                                 o = S q

Shapes      mixed_qkv [B, (2*Hk + Hv) * D] act, any row stride; a, b [B, Hv] act, any row stride; A_log [Hv] fp32; dt_bias [Hv] fp32 or
            act; state [N, Hv, D, D] fp32 or bf16, any slot stride; state_indices [B] int32 or int64, any stride; out [B, 1, Hv, D] act.
Work        a CTA owns `value_tile` rows of one head's state: grid (B * Hv * D / value_tile). Eight lanes own one state row, so a
            warp step is four rows; lane j holds, of every 8 vectors of the row, the j-th. All loads of a warp are issued before
            the first is used. q, k and their norms are formed by every warp: they come from L1/L2.
            o = S_decayed q + d (k . q) is S q after the update, so both dot products run on the decayed state, side by side.
Bytes       a row: 2 * Hv * D * D * state bytes, which is all that matters; (2*Hk + 2*Hv) * D * 2 for q, k, v, out.
Rounding    fp32 throughout; out once to act, a bf16 state once, from the same unrounded values.
Order       each dot product runs along a lane's elements in two interleaved chains, then over the eight lanes by butterfly; no
            reduction crosses a warp, so every value tile gives the same bits.
Bounds      a row whose index is < 0 or >= N reads no state, writes no state and gets zeros. Slot offsets are 64 bits wide.
PDL         A_log and dt_bias are loaded before the dependency wait: no predecessor writes them. Everything else after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_kernels.device import args, vector
from cute_kernels.device.math import exp, fma, rsqrt, sigmoid, softplus
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.device.reduce import lanes_sum
from cute_kernels.gdn.config import GEOMETRY, LANES_PER_ROW, ROWS_PER_STEP

L2_EPS = 1e-6


class GdnPackedDecode:
    """One specialisation: target, heads, head dimension, state width, value tile, vector width."""

    def __init__(
        self, target: str, state_bits: int, key_heads: int, value_heads: int, head_dim: int, value_tile: int, vec_bytes: int
    ):
        self.key_heads, self.value_heads, self.dim, self.tile = key_heads, value_heads, head_dim, value_tile
        self.vec_bytes = vec_bytes
        self.warps, self.steps = GEOMETRY[value_tile]
        self.tiles = head_dim // value_tile
        # a lane's run of state elements is one vector of the target, whatever this call's alignment allows
        self.run = min((16 if target == "sm_90a" else 32) * 8 // state_bits, head_dim // LANES_PER_ROW)
        self.runs = head_dim // (LANES_PER_ROW * self.run)

    @cute.jit
    def __call__(
        self,
        mixed_qkv: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        state_indices: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        rows = mixed_qkv.shape[0]
        if rows > 0:
            self.kernel(mixed_qkv, a, b, A_log, dt_bias, state, state_indices, out, scale).launch(
                grid=(rows * self.value_heads * self.tiles, 1, 1),
                block=(self.warps * 32, 1, 1),
                min_blocks_per_mp=1,
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        mixed_qkv: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        state_indices: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        head_row, tile = cta // self.tiles, cta % self.tiles
        row, head = head_row // self.value_heads, head_row % self.value_heads
        warp, lane = tid // 32, tid % 32
        lane_in_row = lane % LANES_PER_ROW
        value = tile * self.tile + warp * (self.steps * ROWS_PER_STEP) + lane // LANES_PER_ROW  # + 4 a step
        dim, act = self.dim, mixed_qkv.element_type
        release_dependents()
        rate = exp(A_log[head])
        bias = dt_bias[head].to(Float32)
        await_predecessors()

        slot = Int64(state_indices[row])
        width = (2 * self.key_heads + self.value_heads) * dim
        packed = vector.row_at(mixed_qkv, Int64(row) * mixed_qkv.stride[0], width, self.vec_bytes // 2)
        key_head = head // (self.value_heads // self.key_heads)
        q = self.load_keys(packed, key_head, lane_in_row)
        k = self.load_keys(packed, self.key_heads + key_head, lane_in_row)
        v = [packed[(2 * self.key_heads + head) * dim + value + s * ROWS_PER_STEP].to(Float32) for s in range(self.steps)]
        a_in, b_in = a[row, head].to(Float32), b[row, head].to(Float32)

        # keeps the loads above it: the compiler would sink them into the branch, behind the index's latency
        cute.arch.sync_warp()
        result = cute.make_rmem_tensor((self.steps,), act)
        result.fill(0)
        if (slot >= 0) & (slot < state.shape[0]):
            first = slot * state.stride[0] + (head * dim + value) * dim
            rows, fragments = [], []
            for s in cutlass.range_constexpr(self.steps):
                at = vector.row_at(state, first + s * ROWS_PER_STEP * dim, dim, self.vec_bytes * 8 // state.element_type.width)
                fragment = cute.make_rmem_tensor((self.run, self.runs), state.element_type)
                for r in cutlass.range_constexpr(self.runs):
                    vector.load(fragment[None, r], at, r * LANES_PER_ROW + lane_in_row, self.vec_bytes)
                rows.append(at)
                fragments.append(fragment)

            # while the state is on its way: normalise q and k, form the gates
            rq = rsqrt(self.row_dot(q, q) + L2_EPS) * scale
            rk = rsqrt(self.row_dot(k, k) + L2_EPS)
            q, k = [x * rq for x in q], [x * rk for x in k]
            kq = self.row_dot(k, q)
            decay = exp(-(rate * softplus(a_in + bias)))
            beta = sigmoid(b_in)

            for s in cutlass.range_constexpr(self.steps):
                wide = fragments[s].load().to(Float32)
                decayed = [wide[i] * decay for i in range(self.run * self.runs)]
                delta = (v[s] - self.row_dot(decayed, k)) * beta
                result[s] = fma(delta, kq, self.row_dot(decayed, q)).to(act)
                updated = cute.make_rmem_tensor((self.run, self.runs), Float32)
                for i in cutlass.range_constexpr(self.run * self.runs):
                    updated[i] = fma(delta, k[i], decayed[i])
                fragments[s].store(updated.load().to(state.element_type))
                for r in cutlass.range_constexpr(self.runs):
                    vector.store(fragments[s][None, r], rows[s], r * LANES_PER_ROW + lane_in_row, self.vec_bytes)

        if lane_in_row == 0:
            for s in cutlass.range_constexpr(self.steps):
                out[row, 0, head, value + s * ROWS_PER_STEP] = result[s]

    def load_keys(self, packed: cute.Tensor, head, lane_in_row) -> list:
        """A lane's elements of one D-wide head of the packed row, in fp32: the same places as its state elements."""
        fragment = cute.make_rmem_tensor((self.run, self.runs), packed.element_type)
        for r in range(self.runs):
            at = (head * self.runs + r) * LANES_PER_ROW + lane_in_row
            vector.load(fragment[None, r], packed, at, min(self.vec_bytes, self.run * 2))
        wide = fragment.load().to(Float32)
        return [wide[i] for i in range(self.run * self.runs)]

    def row_dot(self, x: list, y: list) -> Float32:
        """Dot product over a state row, in all of its eight lanes: two chains a lane, then a butterfly."""
        even, odd = x[0] * y[0], x[1] * y[1]
        for i in range(2, len(x), 2):
            even, odd = fma(x[i], y[i], even), fma(x[i + 1], y[i + 1], odd)
        return lanes_sum(even + odd, LANES_PER_ROW)


def build(
    target: str,
    *,
    dtype: str,
    state_dtype: str,
    bias_dtype: str,
    index_dtype: str,
    key_heads: int,
    value_heads: int,
    head_dim: int,
    value_tile: int,
    vec_bytes: int,
):
    """The decode for one head geometry; run-time arguments as `GdnPackedDecode.__call__`, no stream."""
    rows, slots = args.rows(), args.rows()
    state_bits = args.bits(state_dtype)
    width = (2 * key_heads + value_heads) * head_dim
    slot_stride = cute.sym_int64(divisibility=vec_bytes * 8 // state_bits)
    heads = (rows, value_heads)
    kernel = GdnPackedDecode(target, state_bits, key_heads, value_heads, head_dim, value_tile, vec_bytes)
    return kernel, (
        args.strided(dtype, (rows, width), (cute.sym_int64(divisibility=vec_bytes // 2), 1), vec_bytes),
        args.strided(dtype, heads, (cute.sym_int64(), 1), 2),
        args.strided(dtype, heads, (cute.sym_int64(), 1), 2),
        args.dense("fp32", value_heads, align=4),
        args.dense(bias_dtype, value_heads, align=args.bits(bias_dtype) // 8),
        args.strided(
            state_dtype,
            (slots, value_heads, head_dim, head_dim),
            (slot_stride, head_dim * head_dim, head_dim, 1),
            vec_bytes,
        ),
        args.strided(index_dtype, (rows,), (cute.sym_int64(),), args.bits(index_dtype) // 8),
        args.dense(dtype, rows, 1, value_heads, head_dim),
        Float32(1.0),
        args.current_stream(),
    )
