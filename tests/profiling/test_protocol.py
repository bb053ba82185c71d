"""The order of what a phase does, on a device with a told clock."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import pytest

from profiling import protocol, stats
from profiling.protocol import Settings, order
from tests.profiling.fake import FakeDevice

FEW = Settings(blocks=2, samples=3, host_blocks=4, host_calls=5)


def work() -> dict[str, object]:
    return {"a": lambda: "a", "b": lambda: "b", "c": lambda: "c"}


def told(calls: dict[str, object], times: dict[str, float]) -> FakeDevice:
    names = {id(call): name for name, call in calls.items()}
    return FakeDevice(lambda call, seen: times[names[id(call)]])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_version_takes_every_place(count: int) -> None:
    names = list("abcdefgh")[:count]
    turns = range(2 * count)
    places = Counter((name, at) for turn in turns for at, name in enumerate(order(names, turn)))
    assert len(places) == count**2
    assert set(places.values()) == {2}
    assert all(sorted(order(names, turn)) == names for turn in turns)


def test_neighbours_change() -> None:
    before = {("a", "b"), ("b", "a")}
    pairs = {
        pair for turn in range(6) for o in [order(["a", "b", "c"], turn)] for pair in itertools.pairwise(o)
    }
    assert before <= pairs


def test_cold() -> None:
    calls = work()
    device = told(calls, {"a": 4.0, "b": 6.0, "c": 2.0})
    graphs = {name: device.capture(call) for name, call in calls.items()}
    prepared: list[int] = []
    ticks: list[int] = []
    times = protocol.cold(
        device, graphs, FEW, lambda: prepared.append(len(device.log)), lambda: ticks.append(1)
    )
    assert times == {"a": [[4.0] * 3] * 2, "b": [[6.0] * 3] * 2, "c": [[2.0] * 3] * 2}
    assert len(ticks) == FEW.blocks
    events = [name for name, _ in device.log]
    timed = [i for i, name in enumerate(events) if name == "time"]
    assert len(timed) == 3 * (FEW.blocks * FEW.samples + protocol.WARMUP_ROUNDS)
    assert all(events[i - 1] == "flush" for i in timed), (
        "the caches are written right before every timed replay"
    )
    assert prepared == [i - 1 for i in timed], (
        "what a replay changes is put back before the caches are written"
    )


def test_cold_pairs_are_taken_side_by_side() -> None:
    """A device that slows down during the run: medians drift, pairs do not."""
    calls = work()
    names = {id(call): name for name, call in calls.items()}
    device = FakeDevice(
        lambda call, seen: (1.0 + 0.1 * seen) * {"a": 3.0, "b": 1.5, "c": 1.0}[names[id(call)]]
    )
    graphs = {name: device.capture(call) for name, call in calls.items()}
    times = protocol.cold(device, graphs, FEW)
    assert len(set(stats.flat(times["a"]))) == 6
    assert stats.flat(stats.ratios(times["a"], times["b"])) == pytest.approx([2.0] * 6)


def test_hot() -> None:
    ran: Counter[str] = Counter()
    calls = {"a": lambda: ran.update("a"), "b": lambda: ran.update("b")}
    device = told(calls, {"a": 1.25, "b": 2.5})
    counts = {"a": 8, "b": 4}
    graphs = {name: device.capture(call, counts[name]) for name, call in calls.items()}
    ran.clear()
    times = protocol.hot(device, graphs, counts, FEW)
    assert times == {"a": [[1.25] * 3] * 2, "b": [[2.5] * 3] * 2}
    rounds = FEW.blocks * FEW.samples + protocol.WARMUP_ROUNDS
    assert ran == {"a": rounds * 8 * 2, "b": rounds * 4 * 2}, "an untimed replay before every timed one"
    assert "flush" not in dict(device.log)


def test_host() -> None:
    now = 0.0

    def spend(microseconds: float) -> None:
        nonlocal now
        now += microseconds * 1e-6

    device = FakeDevice(lambda call, seen: 0.0)
    calls = {"fast": lambda: spend(2.0), "slow": lambda: spend(11.0)}
    times = protocol.host(device, calls, FEW, clock=lambda: now)
    assert [len(block) for block in times["fast"]] == [1] * FEW.host_blocks
    assert stats.flat(times["fast"]) == pytest.approx([2.0] * FEW.host_blocks)
    assert stats.flat(times["slow"]) == pytest.approx([11.0] * FEW.host_blocks)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_collection_while_sampling(was_enabled: bool) -> None:
    states: list[bool] = []
    try:
        gc.enable() if was_enabled else gc.disable()
        device = FakeDevice(lambda call, seen: 1.0)
        protocol.cold(device, {"a": device.capture(lambda: states.append(gc.isenabled()))}, FEW)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
    assert not any(states[1:]), "the first is the capture's"


def test_collector_is_back_after_an_error() -> None:
    device = FakeDevice(lambda call, seen: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        protocol.cold(device, {"a": device.capture(lambda: None)}, FEW)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("cold_us", "count"), [(1.0, 200), (7.5, 200), (30.0, 50), (150.0, 10), (151.0, 0), (2000.0, 0)]
)
def test_hot_count(cold_us: float, count: int) -> None:
    assert Settings().hot_count(cold_us) == count


def test_settings_are_positive() -> None:
    with pytest.raises(ValueError, match="samples: got 0"):
        Settings(samples=0)
