"""hc_mix compiled for every target, executed by the emulator: results, findings, and what it reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import bindings
from bindings import emulated, link, ops, targets, workspace
from bindings import mix as mix_bindings
from bindings.errors import HandoffTimeout
from cute_kernels.hyper import mix_plan
from emulator.counters import Counters
from emulator.findings import FindingsError
from tests.draw import Draw, Inputs, mix
from tests.harness import judge

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(link.compiler() is None, reason="needs a C compiler, for the emulator"),
]

SMALL = dict(H=64, C=4, R=32)
MODEL = dict(H=2560, C=4, R=320)


def emulate(target: str, inputs: Inputs, served_by: str = "cute_kernels.hyper.mix") -> Counters:
    """Runs and judges a call twice, and returns the counters of the last launch. A finding of the emulator is
    an error."""
    with emulated.options(target=target), bindings.backend("emulator"):
        assert bindings.explain("hc_mix", **inputs).implementation == served_by
        for _ in range(2):  # the second one finds the first one's epoch in its workspace
            judge("hc_mix", inputs, (ops.hc_mix(**inputs),))
        return emulated.device().launches[-1]


@pytest.mark.parametrize(
    ("target", "rows", "shape"),
    [
        *((target, 1, SMALL) for target in targets.TARGETS),
        ("sm_90a", 11, SMALL),
        ("sm_100a", 11, SMALL),
        ("sm_100a", 32, SMALL),
        ("sm_100a", 3, dict(H=96, C=2, R=80)),
        ("sm_100a", 2, dict(H=64, C=8, R=16)),
    ],
)
def test_results(target: str, rows: int, shape: dict[str, int]) -> None:
    emulate(target, mix(Draw("emulated"), T=rows, dtype=torch.bfloat16, **shape))


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("rows", [1, 11])
def test_two_launches_have_the_bits_of_one(target: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of call finds the other one's epoch in the workspace."""
    inputs = mix(Draw("emulated"), T=rows, dtype=torch.bfloat16, **SMALL)
    plan = mix_plan.plan(64, 4, 32, mix_plan.bucket_of(rows), target)
    assert isinstance(plan, mix_plan.MixPlan)
    with emulated.options(target=target), bindings.backend("emulator"):
        one = ops.hc_mix(**inputs)
    monkeypatch.setattr(mix_bindings, "_multiprocessors", lambda call: plan.cluster)
    with emulated.options(target=target), bindings.backend("emulator"):
        two = ops.hc_mix(**inputs)
        down, up = emulated.device().launches[-2:]
    weights = [inputs[name].numel() * 2 for name in ("w_down", "w_up")]
    assert down.tma_load_bytes >= weights[0]  # and activations
    assert up.tma_load_bytes == weights[1]
    assert torch.equal(one, two)
    emulate(target, inputs, "cute_kernels.hyper.mix, two launches")
    monkeypatch.undo()
    emulate(target, inputs)


def test_half_precision() -> None:
    emulate("sm_100a", mix(Draw("emulated"), T=5, dtype=torch.float16, **SMALL))


def test_every_weight_is_read_once() -> None:
    """At the model's shape, by copies of the tensor memory accelerator: the weights, and for every cluster
    the one row of activations."""
    inputs = mix(Draw("emulated"), T=1, dtype=torch.bfloat16, **MODEL)
    plan = mix_plan.plan(2560, 4, 320, 8, "sm_100a")
    assert isinstance(plan, mix_plan.MixPlan)
    counters = emulate("sm_100a", inputs)
    weights = sum(inputs[name].numel() * 2 for name in ("w_down", "w_up"))
    assert weights == 13_107_200
    assert counters.tma_load_bytes == weights + plan.groups * inputs["normed"].numel() * 2


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_wait_for_a_cta_that_never_publishes(target: str) -> None:
    """One CTA has counted another number of launches than all others, as if it were late for ever: every CTA
    leaves, results are NaNs, the next call says why, and the one after it is right."""
    inputs = mix(Draw("emulated"), T=2, dtype=torch.bfloat16, **SMALL)
    plan = mix_plan.plan(64, 4, 32, 8, target)
    assert isinstance(plan, mix_plan.MixPlan)
    spaces = spaces_of(plan)
    held = spaces.of(0, False)
    held[plan.control + mix_plan.LIMIT] = 20_000  # nanoseconds
    held.view(torch.int32)[plan.cluster] = 77  # the CTA publishes a part of the first rows
    try:
        with emulated.options(target=target), bindings.backend("emulator"):
            lost = ops.hc_mix(**inputs)
            assert plan.columns == 2
            assert lost.isnan().all()
            assert spaces.expired
            with pytest.raises(HandoffTimeout, match=r"^hc_mix on the emulated device: .* launched nothing"):
                ops.hc_mix(**inputs)
            judge("hc_mix", inputs, (ops.hc_mix(**inputs),))
            assert not spaces.expired
    finally:
        spaces.shared.renew()


def spaces_of(plan: mix_plan.MixPlan) -> workspace.Workspaces:
    return workspace.workspaces(
        torch.device("cpu"), plan, plan.workspace_words, record_word=plan.control + mix_plan.RECORD
    )


LATE = 4, 8
"""CTAs: of odd and even clusters, whose words are the second and the first of a pair."""


@pytest.fixture
def late_publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a workspace's first launch CTA 4 publishes late, in its second one CTA 8."""
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute

    from cute_kernels.device import handoff, system
    from cute_kernels.device.math import select
    from cute_kernels.hyper import mix as kernel

    @cute.jit
    def publish(payload, epoch, address):  # type: ignore[no-untyped-def]
        cta, _, _ = cute.arch.block_idx()
        now = system.nanoseconds()
        end = now + select(cta == select(epoch == 1, cutlass.Int32(LATE[0]), LATE[1]), DELAY, 0)
        while now < end:
            now = system.nanoseconds()
        handoff.publish(payload, epoch, address)

    DELAY = cutlass.Int64(1_000_000)
    monkeypatch.setattr(kernel, "publish", publish)
    emulated._compiled.cache_clear()
    yield
    emulated._compiled.cache_clear()


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_record_names_who_was_missing(target: str, late_publish: None) -> None:
    """The CTA that was late in the first launch, also when its word is the second of a pair, of another
    cluster than the first; not who was late in the second one, which others left because of the first."""
    inputs = mix(Draw("emulated"), T=2, dtype=torch.bfloat16, **SMALL)
    plan = mix_plan.plan(64, 4, 32, 8, target)
    assert isinstance(plan, mix_plan.MixPlan)
    assert (plan.cluster, plan.down_rows) == (4, 2)
    others = LATE[0] * plan.up_hidden  # outputs of CTAs that were not late: these found everything
    spaces = spaces_of(plan)
    spaces.shared.renew()
    held = spaces.of(0, False)
    held[plan.control + mix_plan.LIMIT] = 300_000  # nanoseconds, 20 a look at the emulated clock
    try:
        with emulated.options(target=target), bindings.backend("emulator"):
            assert ops.hc_mix(**inputs)[:, :others].isnan().all()
            assert spaces.expired == 1 + LATE[0]
            spaces.shared.value.value = 0  # as if a graph held both launches
            assert ops.hc_mix(**inputs)[:, :others].isnan().all()
            assert spaces.expired == 0  # nobody's own time ran out
            spaces.shared.value.value = 1 + LATE[0]
            with pytest.raises(HandoffTimeout, match=f"CTA {LATE[0]} for one"):
                bindings.check()
            bindings.check()
            held[plan.control + mix_plan.LIMIT] = 10**9
            judge("hc_mix", inputs, (ops.hc_mix(**inputs),))
    finally:
        spaces.shared.renew()


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_inputs_may_come_from_the_kernel_directly_before(
    target: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one but w_down, whichever launch reads it."""
    inputs = mix(Draw("emulated"), T=2, dtype=torch.bfloat16, **SMALL)
    plan = mix_plan.plan(64, 4, 32, 8, target)
    assert isinstance(plan, mix_plan.MixPlan)
    if launches == 2:
        monkeypatch.setattr(mix_bindings, "_multiprocessors", lambda call: plan.cluster)

    def normalise(name: str, group: int) -> None:
        """Makes an input anew by a kernel that releases its dependents at its start."""
        out = inputs[name]
        made = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        weight = torch.zeros(out.shape[1], dtype=torch.bfloat16)
        ops.grouped_gemma_rmsnorm(made, weight, 1e-6, group, out=out)

    with emulated.options(target=target), bindings.backend("emulator"):
        emulated.device().synchronize()
        for name, group in (("w_up", 32), ("normed", 64)):
            normalise(name, group)
            judge("hc_mix", inputs, (ops.hc_mix(**inputs),))
        assert bindings.explain("hc_mix", **inputs).launches == launches
        normalise("w_down", 64)
        with pytest.raises(FindingsError, match=r"w_down .* ahead of griddepcontrol\.wait"):
            ops.hc_mix(**inputs)
    spaces_of(plan).shared.renew()
