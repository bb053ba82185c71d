"""The geometry of the HC mix: who owns which weight, and what fits."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bindings import compiler, elf, jit, precompile, sass, targets
from bindings.store import OBJECT
from cute_kernels.hyper import mix_plan
from cute_kernels.hyper.mix_plan import BUCKETS, MAX_SMEM, SLAB, MixPlan, bucket_of, plan

pytestmark = pytest.mark.cpu

MODEL = (2560, 4, 320)
SHAPES = given(
    hidden=st.integers(1, 400).map(lambda n: 8 * n),
    streams=st.sampled_from([1, 2, 4, 8]),
    low_rank=st.integers(1, 24).map(lambda n: 16 * n),
    bucket=st.sampled_from(BUCKETS),
    target=st.sampled_from(targets.TARGETS),
)


def made(hidden: int, streams: int, low_rank: int, bucket: int, target: str) -> MixPlan:
    found = plan(hidden, streams, low_rank, bucket, target)
    assume(isinstance(found, MixPlan))
    assert isinstance(found, MixPlan)
    return found


def boxes(p: MixPlan) -> tuple[list[tuple[range, range]], list[tuple[range, range]]]:
    """(rows, elements of K) of every box that a CTA copies, of w_down and of w_up, cut to the tensors."""

    def inside(first: int, count: int, end: int) -> range:
        return range(min(first, end), min(first + count, end))

    down, up = [], []
    for cta in range(p.grid):
        rank, group = cta % p.cluster, cta // p.cluster
        rows = inside(group * p.down_rows, p.down_rows, p.low_rank)
        down += [(rows, inside((rank * p.down_slabs + s) * SLAB, SLAB, p.width)) for s in range(p.down_slabs)]
        own = inside(cta * p.up_hidden, p.up_hidden, p.hidden)
        for s in range(p.up_slabs):
            columns = inside(s * SLAB, SLAB, p.low_rank)
            up += [
                (range(c * p.hidden + own.start, c * p.hidden + own.stop), columns) for c in range(p.streams)
            ]
    return down, up


@SHAPES
def test_every_weight_is_copied_once(
    hidden: int, streams: int, low_rank: int, bucket: int, target: str
) -> None:
    p = made(hidden, streams, low_rank, bucket, target)
    for found, rows, columns in zip(boxes(p), (low_rank, p.width), (p.width, low_rank), strict=True):
        assert sum(len(r) * len(k) for r, k in found) == rows * columns
        corners = Counter((r.start, k.start) for r, k in found if len(r) and len(k))
        assert set(corners.values()) == {1}
        assert {k.start for _, k in found if len(k)} == set(range(0, columns, SLAB))


@SHAPES
def test_a_plan_fits(hidden: int, streams: int, low_rank: int, bucket: int, target: str) -> None:
    p = made(hidden, streams, low_rank, bucket, target)
    assert p.smem_bytes <= MAX_SMEM
    assert p.grid <= mix_plan.CTAS
    assert p.cluster * p.down_slabs * SLAB == p.width
    assert p.columns * p.cluster == p.bucket
    assert p.down_rows % 2 == 0  # a pair of inner activations is one CTA's
    assert p.up_rows % 16 == 0
    assert p.inner_offset >= 4 * p.bucket * p.splits * p.part_stride
    assert p.inner_offset >= 4 * p.bucket * p.parts * p.sum_stride
    assert p.inner_offset + p.inner_bytes <= p.pool_bytes
    assert p.up_steps % p.parts == 0
    assert max(p.down_rows, p.up_hidden, p.bucket) <= 256  # of a TMA box
    if p.tensor_memory:
        assert p.bucket * (1 + p.up_tiles) <= 512
        assert p.down_stride % 8 == 0
    else:
        assert p.up_tiles * p.parts <= p.warps


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_model_has_a_plan(bucket: int, target: str) -> None:
    p = plan(*MODEL, bucket, target)
    assert isinstance(p, MixPlan)
    assert p.grid == mix_plan.CTAS


def test_what_has_no_plan_says_why() -> None:
    assert plan(2560, 3, 320, 8, "sm_90a") == "C must be one of 1, 2, 4, 8"
    assert plan(2564, 4, 320, 8, "sm_90a") == "H must be a multiple of 8"
    assert plan(2560, 4, 328, 8, "sm_90a") == "R must be a multiple of 16"
    assert plan(40, 1, 320, 8, "sm_90a") == "C*H must be a multiple of 64"
    unfit = f"a CTA's share of the weights fits {MAX_SMEM} bytes of shared memory"
    for target in targets.TARGETS:
        assert plan(16384, 4, 1024, 8, target) == unfit
    # 233908 bytes, more than a kilobyte of them barriers
    assert plan(1672, 8, 336, 8, "sm_90a") == unfit


@pytest.mark.parametrize(("rows", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_buckets(rows: int, bucket: int) -> None:
    assert bucket_of(rows) == bucket


@pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("target", targets.TARGETS)
def test_the_machine_code_has_the_instructions_of_the_plan(target: str) -> None:
    configs = [c for c in precompile.registered((target,), sample=True) if c.kernel == "hc_mix"]
    assert {(c.key.params["dtype"], c.key.params["bucket"]) for c in configs} == {
        (dtype, bucket) for dtype in ("bf16", "fp16") for bucket in BUCKETS
    }
    for result in precompile.build_all(configs, None, jobs=2):
        assert result.report is not None, result.error
        p = plan(*MODEL, int(result.config.key.params["bucket"]), target)
        assert isinstance(p, MixPlan)
        counted = {
            name: sum(n for key, n in result.report.instructions.items() if key.split(".")[0] == name)
            for name in ("UTMALDG", "UTCHMMA", "LDTM", "UTCBAR", "HMMA", "LDGSTS")
        }
        assert counted["UTMALDG"] == p.down_slabs + p.up_slabs + p.x_boxes * p.staged, result.config
        assert counted["LDGSTS"] == 0, result.config
        if p.tensor_memory:
            assert counted["UTCHMMA"] == p.down_slabs * SLAB // 16 + p.up_tiles * p.up_steps, result.config
            assert counted["LDTM"] == 1 + p.up_tiles, result.config
            assert counted["UTCBAR"] == 2, result.config
            assert counted["HMMA"] == 0, result.config
        else:
            assert counted["HMMA"] > 0, result.config
        assert result.report.dynamic_smem == p.smem_bytes, result.config


@pytest.mark.parametrize(
    ("hidden", "streams", "low_rank", "bucket", "target"),
    [
        (424, 8, 64, 8, "sm_90a"),  # one CTA a cluster, 53 slabs each
        (104, 8, 32, 32, "sm_90a"),
        (104, 8, 32, 16, "sm_100a"),
    ],
)
def test_the_plan_knows_the_shared_memory(
    hidden: int, streams: int, low_rank: int, bucket: int, target: str
) -> None:
    pytest.importorskip("cutlass")
    shape = dict(hidden=hidden, streams=streams, low_rank=low_rank, bucket=bucket)
    p = plan(hidden, streams, low_rank, bucket, target)
    assert isinstance(p, MixPlan)
    assert p.cluster < 8
    params = dict(shape, dtype="bf16", launch="cooperative")
    assert compiler.compile_kernel("cute_kernels.hyper.mix", target, params).dynamic_smem == p.smem_bytes


def codes_of(target: str, launch: str, bucket: int) -> list[str]:
    """The disassembled kernels of a way to launch, the down projection's first."""
    tool = sass.nvdisasm()
    assert tool is not None
    hidden, streams, low_rank = MODEL
    params = dict(
        hidden=hidden, streams=streams, low_rank=low_rank, bucket=bucket, dtype="bf16", launch=launch
    )
    entry = jit.prepare("cute_kernels.hyper.mix", target, params)
    (binary,) = elf.cubins(entry.read(OBJECT))
    found = [s.data for s in elf.Elf(binary).sections if s.name.startswith(".text.")]
    # only the down projection has clusters
    return sorted((sass.disassemble(c, target, tool) for c in found), key=lambda c: "UCGABAR_ARV" not in c)


@pytest.mark.skipif(sass.nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("bucket", [8, 32])
@pytest.mark.parametrize("launch", ["cooperative", "split"])
def test_what_stands_before_the_dependency_wait(launch: str, bucket: int, target: str) -> None:
    """The copies of w_down, all of them, and no other access; the release of the next launch, where there is
    tensor memory behind the barrier that follows its allocation."""
    p = plan(*MODEL, bucket, target)
    assert isinstance(p, MixPlan)
    codes = codes_of(target, launch, bucket)
    assert len(codes) == {"cooperative": 1, "split": 2}[launch]
    for code, slabs in zip(codes, (p.down_slabs, 0), strict=False):
        release, wait = code.index("PREEXIT"), code.index("ACQBULK")
        assert release < wait
        assert (code.index("BAR.SYNC") < release) == p.tensor_memory
        before = re.findall(r"\b(UTMALDG\.\dD|LDG|STG|ATOMG|REDG?)\b", code[:wait])
        assert before == ["UTMALDG.2D"] * slabs


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_launch_that_is_not_cooperative_runs_the_same_machine_code(target: str) -> None:
    """What a profiler sees is what is measured elsewhere."""
    configs = [c for c in precompile.registered((target,), sample=True) if c.kernel == "hc_mix"]
    params = next(c.key.params for c in configs if c.key.params["bucket"] == BUCKETS[0])
    codes = []
    for launch in ("cooperative", "unguarded"):
        entry = jit.prepare("cute_kernels.hyper.mix", target, {**params, "launch": launch})
        (binary,) = elf.cubins(entry.read(OBJECT))
        (code,) = [s.data for s in elf.Elf(binary).sections if s.name.startswith(".text.")]
        codes.append(code)
    assert codes[0] == codes[1]
