"""The gate's own stream: order and lifetimes with stand-in streams, and the real thing on a GPU."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from bindings import hyper, ops
from bindings.hyper import HCState
from tests.bindings.boundaries import CHAINS, CPU, DTYPES, ROWS, Chain, assert_same, connection, random


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class FakeCuda:
    """Stands for `torch.cuda` in `_GateStreams`: its streams and events write down what they are told."""

    class Event:
        pass

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.capturing = False
        self.current = self.Stream(name="main")

    def Stream(self, device: int = 0, name: str = "side") -> object:
        fake = self

        class Stream:
            def wait_stream(self, other: object) -> None:
                fake.log.append((name, "waits for", other.name))

            def wait_event(self, event: object) -> None:
                fake.log.append((name, "waits for", event))

            def record_event(self) -> object:
                event = fake.Event()
                fake.log.append((name, "records", event))
                return event

        stream = Stream()
        stream.name = name
        return stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device: int) -> object:
        return self.current

    def current_device(self) -> int:
        return 0


@pytest.mark.cpu
class TestGateStreams:
    """The order of fork, gate and join, and what is kept alive until when; the streams are stand-ins."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        fake = FakeCuda()
        monkeypatch.setattr(hyper.torch, "cuda", fake)
        monkeypatch.setattr(hyper, "capturing", lambda device: fake.capturing)
        gate = ops.hc_gate

        def logged(*args: object, **kw: object) -> Tensor:
            fake.log.append((fake.current.name, "runs", "gate"))
            return gate(*args, **kw)

        monkeypatch.setattr(ops, "hc_gate", logged)
        return fake

    @pytest.fixture
    def gates(self, cuda: FakeCuda) -> hyper._GateStreams:
        gates = hyper._GateStreams()
        gates.prepare(CPU)
        return gates

    @staticmethod
    def launch(gates: hyper._GateStreams) -> tuple[Tensor, object]:
        return gates.launch(_zeros(3, 256), _zeros(4, 256))

    def test_fork_gate_join(self, gates: hyper._GateStreams, cuda: FakeCuda) -> None:
        partials, event = self.launch(gates)
        assert partials.shape == (3, 8, 4)
        gates.join(event, CPU)
        assert cuda.log == [
            ("side", "waits for", "main"),
            ("side", "runs", "gate"),
            ("side", "records", event),
            ("main", "waits for", event),
        ]
        assert gates._pending[0] == []

    def test_one_stream_a_device(self, gates: hyper._GateStreams) -> None:
        stream = gates._streams[0]
        gates.prepare(CPU)
        assert gates._streams == {0: stream}

    def test_a_dropped_gate_is_held_until_its_stream_has_waited(
        self, gates: hyper._GateStreams, cuda: FakeCuda
    ) -> None:
        _, dropped = self.launch(gates)
        gc.collect()
        assert [gate.event for gate in gates._pending[0]] == [dropped]
        _, event = self.launch(gates)
        assert cuda.log[3:5] == [("main", "waits for", dropped), ("side", "waits for", "main")]
        assert [gate.event for gate in gates._pending[0]] == [event]

    def test_a_dropped_gate_of_a_capture_is_held_and_never_waited_for(
        self, gates: hyper._GateStreams, cuda: FakeCuda
    ) -> None:
        cuda.capturing = True
        _, dropped = self.launch(gates)
        _, event = self.launch(gates)
        gates.join(event, CPU)
        assert [gate.event for gate in gates._pending[0]] == [dropped]
        cuda.capturing = False
        _, later = self.launch(gates)
        assert [gate.event for gate in gates._pending[0]] == [later]
        assert ("main", "waits for", dropped) not in cuda.log

    def test_gates_of_two_streams_wait_only_for_their_own(
        self, gates: hyper._GateStreams, cuda: FakeCuda
    ) -> None:
        _, first = self.launch(gates)
        with cuda.stream(cuda.Stream(name="other")):
            _, second = self.launch(gates)
            assert ("other", "waits for", first) not in cuda.log
            gates.join(second, CPU)
        assert [gate.event for gate in gates._pending[0]] == [first]
        gates.join(first, CPU)
        assert gates._pending[0] == []

    def test_a_write_on_another_stream_keeps_the_tensors_for_it(
        self, gates: hyper._GateStreams, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorded: list[tuple[int, object]] = []
        monkeypatch.setattr(
            Tensor, "record_stream", lambda t, s: recorded.append((t.data_ptr(), s)), raising=False
        )
        partials, event = self.launch(gates)
        other = cuda.Stream(name="other")
        with cuda.stream(other):
            gates.join(event, CPU)
        assert (partials.data_ptr(), other) in recorded
        assert len(recorded) == 2
        assert gates._pending[0] == []

    def test_a_captured_write_on_another_stream_keeps_the_tensors_held(
        self, gates: hyper._GateStreams, cuda: FakeCuda
    ) -> None:
        cuda.capturing = True
        _, event = self.launch(gates)
        with cuda.stream(cuda.Stream(name="other")):
            gates.join(event, CPU)
        assert cuda.log[-1] == ("other", "waits for", event)
        assert [gate.event for gate in gates._pending[0]] == [event]


GATES = [("side", False), ("main", False), ("side", True)]
"""Where the gate runs, and whether a write prepares it where it can."""


def _delay_gates() -> None:
    """Keeps the side stream busy for some milliseconds, so that nothing is in time by luck."""
    with torch.cuda.stream(hyper._gates.prepare(torch.device("cuda", 0))):
        torch.cuda._sleep(10_000_000)


@pytest.mark.gpu
class TestGpu:
    device = torch.device("cuda", 0)

    def test_a_write_waits_for_a_late_gate(self) -> None:
        chain = Chain.make("mixed", torch.bfloat16, 2, self.device, hidden=2560)
        expected = chain.plain()
        _delay_gates()
        assert_same(chain.run(), expected)

    @pytest.mark.parametrize(("gate_stream", "fused"), GATES)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("kind", CHAINS)
    def test_chain_equals_the_unfused_sequence(
        self, kind: str, rows: int, dtype: torch.dtype, gate_stream: str, fused: bool
    ) -> None:
        chain = Chain.make(kind, dtype, rows, self.device, gate_stream=gate_stream, fused=fused)
        assert_same(chain.run(), chain.plain())

    def test_a_prepared_gate_needs_no_stream(self) -> None:
        chain = Chain.make("plain", torch.bfloat16, 2, self.device, hidden=2560)
        by, reader = chain.connections[:2]
        x, state = by.read(HCState.start(chain.residual))
        written = by.write(x, state, reader, reader.inject_weight)
        _, read = reader.read(written)
        assert read.gate_event is None
        assert torch.equal(read.gate_partials, ops.hc_gate(written.normed, reader.inject_weight))

    def test_the_gate_has_its_stream(self) -> None:
        chain = Chain.make("plain", torch.bfloat16, 2, self.device, hidden=2560)
        _, state = chain.connections[0].read(HCState.start(chain.residual))
        assert state.gate_event is not None
        on_main = dataclasses.replace(chain.connections[0], gate_stream="main")
        _, same = on_main.read(HCState.start(chain.residual))
        assert same.gate_event is None
        state.gate_event.synchronize()
        assert torch.equal(state.gate_partials, same.gate_partials)

    @pytest.mark.parametrize(("gate_stream", "fused"), GATES)
    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_a_captured_chain_replays_with_changed_inputs(
        self, rows: int, gate_stream: str, fused: bool
    ) -> None:
        options = dict(hidden=2560, gate_stream=gate_stream, fused=fused)
        chain = Chain.make("mixed", torch.bfloat16, rows, self.device, **options)
        chain.run()  # compiles what the capture needs
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain.run()
        for seed in range(5):
            chain.residual.copy_(random(chain.residual.shape, torch.bfloat16, self.device, 100 + seed, 3.0))
            graph.replay()
            assert_same(got, chain.plain())

    def test_two_states_in_flight_on_two_streams(self) -> None:
        chains = [Chain.make("mixed", torch.bfloat16, rows, self.device, 2560, seed=rows) for rows in (3, 7)]
        expected = [chain.plain() for chain in chains]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        for _ in range(20):
            running = [chain.steps() for chain in chains]
            results: list[Tensor | None] = [None, None]
            for _ in range(len(chains[0].kinds) + 1):
                for i, (steps, stream) in enumerate(zip(running, streams, strict=True)):
                    with torch.cuda.stream(stream):
                        results[i] = next(steps)
            torch.cuda.synchronize()
            for got, wanted in zip(results, expected, strict=True):
                assert_same(got, wanted)

    def test_two_interleaved_states_in_one_capture(self) -> None:
        chains = [Chain.make("mixed", torch.bfloat16, rows, self.device, 2560, seed=rows) for rows in (3, 7)]
        expected = [chain.plain() for chain in chains]
        for chain in chains:
            chain.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            *_, results = zip(*(chain.steps() for chain in chains), strict=True)
        for _ in range(20):
            graph.replay()
        for got, wanted in zip(results, expected, strict=True):
            assert_same(got, wanted)

    def test_the_memory_of_a_dropped_gate_is_not_reused_under_it(self) -> None:
        by = connection(torch.bfloat16, self.device, 3, hidden=2560)
        residual = random((512, 10240), torch.bfloat16, self.device, 4, 3.0)
        normed = ops.grouped_gemma_rmsnorm(residual, by.norm_weight, by.eps, group_size=by.hidden)
        expected = ops.hc_gate(normed, by.inject_weight)
        for _ in range(5):
            _delay_gates()
            _, dropped = by.read(HCState.start(residual))
            partials = dropped.gate_partials
            del dropped
            # Would take the normed rows' memory, and poison it, if it were free.
            torch.full((512, 10240), float("nan"), dtype=torch.bfloat16, device=self.device)
            torch.cuda.synchronize()
            assert torch.equal(partials, expected)

    def test_no_gate_is_held_after_its_write(self) -> None:
        chain = Chain.make("mixed", torch.bfloat16, 2, self.device)
        chain.run()
        assert hyper._gates._pending[0] == []


@pytest.mark.multi_gpu
def test_a_state_on_a_device_that_is_not_the_current_one() -> None:
    chain = Chain.make("mixed", torch.bfloat16, 2, torch.device("cuda", 1), hidden=2560)
    assert torch.cuda.current_device() == 0
    assert_same(chain.run(), chain.plain())
