"""Packed single-token GDN decode: one step of the gated delta rule, state updated in place.

For row b, value head h, key head h // (Hv/Hk), with S = state[state_indices[b], h] (D value rows of D
keys), in fp32:

    q = q * rsqrt(sum(q^2) + 1e-6) * scale       k = k * rsqrt(sum(k^2) + 1e-6)
    S = S * exp(-exp(A_log) * softplus(a + dt_bias))
    d = (v - S k) * sigmoid(b)                    one value a state row
    S = S + d k^T                                 o = S q

Shapes      mixed_qkv [B, (2*Hk + Hv) * D] act, any row stride; a, b [B, Hv] act, any row stride; A_log [Hv]
            fp32; dt_bias [Hv] fp32 or act; state [N, Hv, D, D] fp32 or bf16, any slot stride; state_indices
            [B] int32 or int64, any stride; out [B, 1, Hv, D] act.
Work        a CTA owns `value_tile` rows of one head's state: grid (B * Hv * D / value_tile); a warp owns
            4 or 8 of them (config.py). A lane holds one vector of a state row (16 bytes on SM90, 32 on
            SM100), so a row takes D / elems lanes and the warp covers its rows in `steps` passes, all
            loaded before the first is used. q, k and their norms are formed by every warp: they come
            from L1/L2. The sums over a row halve what a lane carries as they go, so each row's total
            ends in one group of lanes, its owners: they alone need v and write out; delta goes back to
            the row's lanes by shuffle. Written this way o = S_decayed q + d (k . q), which is S q after
            the update, both dot products run on the decayed state, side by side; where d is Inf or NaN
            the sum is taken again as it is defined. No shared memory: gathering the outputs there was
            0.1 to 0.2 us slower cold at B = 1.
Bytes       a row: 2 * Hv * D * D * state bytes, which is all that matters; (2*Hk + 2*Hv) * D * 2 for q, k,
            v, out.
Rounding    fp32 throughout; out once to act, a bf16 state once, from the same unrounded values.
Order       a dot product runs along a lane's elements in two interleaved chains, then over the row's lanes
            by butterfly; no reduction crosses a warp, so every value tile gives the same bits.
Bounds      a row whose index is < 0 or >= N reads no state, writes no state and gets zeros. Slot offsets
            are 64 bits wide.
PDL         A_log and dt_bias are loaded before the dependency wait: no predecessor writes them. Everything
            else after it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_kernels.device import args, vector
from cute_kernels.device.math import exp, fma, rsqrt_normal, select, sigmoid, softplus
from cute_kernels.device.pdl import await_predecessors, release_dependents
from cute_kernels.device.reduce import lanes_sum, lanes_sum_each
from cute_kernels.gdn.config import ROWS_PER_WARP

L2_EPS = 1e-6


class GdnPackedDecode:
    """One specialisation: target, heads, head dimension, state width, value tile, vector width."""

    def __init__(
        self,
        target: str,
        state_bits: int,
        key_heads: int,
        value_heads: int,
        head_dim: int,
        value_tile: int,
        vec_bytes: int,
    ):
        self.key_heads, self.value_heads, self.dim, self.tile = key_heads, value_heads, head_dim, value_tile
        self.vec_bytes = vec_bytes
        rows_per_warp = ROWS_PER_WARP[value_tile]
        self.warps = value_tile // rows_per_warp
        self.owners = 32 // rows_per_warp  # lanes that end up with one row's total
        self.tiles = head_dim // value_tile
        # a lane's vector is the target's, whatever this call's alignment; a row has at least eight lanes
        self.elems = min((16 if target == "sm_90a" else 32) * 8 // state_bits, head_dim // 8)
        self.lanes = head_dim // self.elems
        self.rows_per_step = 32 // self.lanes
        self.rows_per_warp = rows_per_warp
        self.steps = rows_per_warp // self.rows_per_step

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
                min_blocks_per_mp=1,  # or the compiler, after occupancy, serialises the loads
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
        group, lane_in_row = lane // self.lanes, lane % self.lanes
        first_row = tile * self.tile + warp * self.rows_per_warp
        owned_row = first_row + (lane_in_row // self.owners) * self.rows_per_step + group
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
        v = packed[(2 * self.key_heads + head) * dim + owned_row].to(Float32)
        a_in, b_in = a[row, head].to(Float32), b[row, head].to(Float32)

        # keeps the loads above it: the compiler would sink them into the branch, behind the index's latency
        cute.arch.sync_warp()
        o = Float32(0.0)
        if (slot >= 0) & (slot < state.shape[0]):
            first = slot * state.stride[0] + (head * dim + first_row + group) * dim
            rows, fragments = [], []
            for s in cutlass.range_constexpr(self.steps):
                at = vector.row_at(
                    state,
                    first + s * self.rows_per_step * dim,
                    dim,
                    self.vec_bytes * 8 // state.element_type.width,
                )
                fragment = cute.make_rmem_tensor((self.elems,), state.element_type)
                vector.load(fragment, at, lane_in_row, self.vec_bytes)
                rows.append(at)
                fragments.append(fragment)

            # while the state is on its way: normalise q and k, form the gates
            rq = rsqrt_normal(lanes_sum(self.dot(q, q), self.lanes) + L2_EPS) * scale
            rk = rsqrt_normal(lanes_sum(self.dot(k, k), self.lanes) + L2_EPS)
            q, k = [x * rq for x in q], [x * rk for x in k]
            kq = lanes_sum(self.dot(k, q), self.lanes)
            decay = exp(-(rate * softplus(a_in + bias)))
            beta = sigmoid(b_in)

            decayed = []
            for s in cutlass.range_constexpr(self.steps):
                wide = fragments[s].load().to(Float32)
                decayed.append([wide[i] * decay for i in range(self.elems)])
            sk = lanes_sum_each([self.dot(x, k) for x in decayed], self.lanes)
            sq = lanes_sum_each([self.dot(x, q) for x in decayed], self.lanes)
            delta = (v - sk) * beta
            deltas = [
                cute.arch.shuffle_sync(delta, group * self.lanes + s * self.owners) for s in range(self.steps)
            ]
            updated = []
            for s in cutlass.range_constexpr(self.steps):
                updated.append([fma(deltas[s], k[i], decayed[s][i]) for i in range(self.elems)])
                wide = cute.make_rmem_tensor((self.elems,), Float32)
                for i in cutlass.range_constexpr(self.elems):
                    wide[i] = updated[s][i]
                fragments[s].store(wide.load().to(state.element_type))
                vector.store(fragments[s], rows[s], lane_in_row, self.vec_bytes)

            o = fma(delta, kq, sq)
            # where delta is not finite this may be Inf in place of NaN: there the sum is taken as defined
            finite = delta - delta == 0.0
            if cute.arch.vote_any_sync(not finite):
                o = select(finite, o, lanes_sum_each([self.dot(x, q) for x in updated], self.lanes))

        if lane % self.owners == 0:
            values = vector.row_of(out, Int64(row) * self.value_heads + head, dim, 16)
            values[owned_row] = o.to(act)

    def load_keys(self, packed: cute.Tensor, head, lane_in_row) -> list:
        """A lane's elements of one head of the packed row, in fp32: the same places as its state elements."""
        fragment = cute.make_rmem_tensor((self.elems,), packed.element_type)
        vector.load(fragment, packed, head * self.lanes + lane_in_row, self.vec_bytes)
        wide = fragment.load().to(Float32)
        return [wide[i] for i in range(self.elems)]

    def dot(self, x: list, y: list) -> Float32:
        """A lane's part of a dot product over a row, in two chains."""
        even, odd = x[0] * y[0], x[1] * y[1]
        for i in range(2, len(x), 2):
            even, odd = fma(x[i], y[i], even), fma(x[i + 1], y[i + 1], odd)
        return even + odd


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
