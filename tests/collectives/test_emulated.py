"""The compiled kernels on the CPU, for every target: bits of whole rows, and what an expired wait leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import emulator
from bindings import link, targets
from collectives.launch import Form, Plain
from cute_kernels.hyper import norm as norm_kernel
from cute_kernels.moe import config, finalize_all_reduce
from tests.collectives.virtual import draw, finalized, moe_inputs, rank_sum, same_bits

pytestmark = pytest.mark.skipif(
    link.compiler() is None, reason="needs a C compiler, which the emulator is built with"
)

HIDDEN, TOP_K, ROWS, N = 2560, 10, 2, 2


def compiled(module, target: str, **params):  # type: ignore[no-untyped-def]
    import cutlass.cute as cute

    entry, fake = module.build(target, **params)
    return cute.compile(entry, *fake, options=f"--enable-tvm-ffi --gpu-arch {target}")


class Ranks:
    """Two ranks on one emulated device, which has room for all of their CTAs: each waits for the other's."""

    def __init__(self, device: emulator.Device, target: str):
        self.device, self.target = device, target
        nbytes = 2 * N * ROWS * HIDDEN * 2
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(N)]
        self.peers = torch.tensor([b.data_ptr() for b in self.buffers], dtype=torch.int64)
        self.rounds = [torch.zeros(ROWS * config.parts(target, HIDDEN), dtype=torch.int32) for _ in range(N)]
        self.poison = [torch.zeros(4, dtype=torch.int32) for _ in range(N)]
        self.records = [torch.zeros(config.RECORD_MISSING + N, dtype=torch.int32) for _ in range(N)]
        for i in range(N):
            device.register(self.buffers[i], f"buffer of rank {i}")
            device.register(self.records[i], f"record of rank {i}")

    def run(  # type: ignore[no-untyped-def]
        self, kernel, tensors, rows: int, offset: float = 0.0, ranks=range(N), timeout_ns: int = 10**13
    ) -> list[Tensor]:
        outs = [torch.full((rows, HIDDEN), float("nan"), dtype=tensors[0][0].dtype) for _ in range(N)]
        with self.device.together():
            for i in ranks:
                own = (self.peers, self.rounds[i], self.poison[i], i, ROWS, self.records[i].data_ptr())
                with self.device.stream(i):
                    kernel(*tensors[i], outs[i], *own, timeout_ns, 1e-6, offset)
        return outs


@pytest.mark.parametrize("target", targets.TARGETS)
def test_norm_has_the_norm_kernels_bits(target: str) -> None:
    """Its sum of squares runs over several CTAs in the order in which that kernel's runs over one."""
    random = torch.Generator().manual_seed(1)
    x = [draw("normal", (ROWS, HIDDEN), random) for _ in range(N)]
    gain = draw("normal", (HIDDEN,), random)
    with emulator.device(target, resident=64) as device:
        ranks = Ranks(device, target)
        kernel = compiled(finalize_all_reduce, target, **Plain(norm=True).params(N, HIDDEN, TOP_K))
        outs = ranks.run(kernel, [(one, None, None, None, None, gain) for one in x], ROWS, offset=1.0)
        alone = compiled(norm_kernel, target, dtype="bf16", width=HIDDEN, group_size=HIDDEN, vec_bytes=16)
        want = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
        alone(rank_sum(x), gain, want, 1e-6)
    assert all(same_bits(out, want) for out in outs)


@pytest.mark.parametrize(
    ("target", "shared"), [("sm_90a", "gated"), ("sm_90a", "none"), ("sm_100a", "gated")]
)
def test_fused_has_the_references_bits(target: str, shared: str) -> None:
    random = torch.Generator().manual_seed(2)
    form = Form("fp32" if shared == "gated" else "bf16", shared)
    with emulator.device(target, resident=64, schedule="random", seed=3) as device:
        ranks = Ranks(device, target)
        kernel = compiled(finalize_all_reduce, target, **form.params(N, HIDDEN, TOP_K))
        for rows, kind in ((2, "halves"), (1, "zeros"), (1, "bits")):
            inputs = [moe_inputs(rows, form, random, kind) for _ in range(N)]
            outs = ranks.run(kernel, [(*one, None) for one in inputs], rows)
            assert all(same_bits(out, finalized(inputs)) for out in outs), (rows, kind)
        assert not any(buffer.any() for buffer in ranks.buffers)
        assert ranks.rounds[0].tolist() == ranks.rounds[1].tolist()
        assert sorted(set(ranks.rounds[0].tolist())) == [1, 3]  # row 1 was in one of the three


def test_an_expired_wait_is_recorded_and_later_rounds_do_nothing() -> None:
    target, random = "sm_90a", torch.Generator().manual_seed(4)
    x = [draw("normal", (ROWS, HIDDEN), random) for _ in range(N)]
    tensors = [(one, None, None, None, None, None) for one in x]
    with emulator.device(target, resident=64) as device:
        ranks = Ranks(device, target)
        kernel = compiled(finalize_all_reduce, target, **Plain().params(N, HIDDEN, TOP_K))
        ranks.run(kernel, tensors, ROWS)
        outs = ranks.run(kernel, tensors, ROWS, ranks=[1], timeout_ns=1000)
        assert outs[1].isnan().all()
        assert ranks.records[1].tolist() == [1, 1, 1, 0]  # expired, in round 1, rank 0 missing
        assert ranks.poison[1].tolist() == [1, 0, 0, 0]
        assert not ranks.records[0].any()
        before = [buffer.clone() for buffer in ranks.buffers]
        outs = ranks.run(kernel, tensors, ROWS, ranks=[1])
        assert outs[1].isnan().all()
        assert all(torch.equal(buffer, old) for buffer, old in zip(ranks.buffers, before, strict=True))
