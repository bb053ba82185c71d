"""`bindings.hyper`: chains of layer boundaries, the rules of the state, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bindings.errors import InvalidArgument
from bindings.hyper import HCState, HyperConnection
from profiling.observe import watch
from tests.bindings.boundaries import (
    CHAINS,
    CPU,
    DTYPES,
    ROWS,
    STREAMS,
    Chain,
    assert_same,
    block,
    connection,
    random,
)


@pytest.fixture
def calls() -> Iterator[Counter[str]]:
    """Counts the operators that are called."""
    with watch() as seen:
        yield seen.counts


@pytest.mark.cpu
class TestBoundaries:
    @pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("kind", CHAINS)
    def test_chain_equals_the_unfused_sequence(
        self, kind: str, rows: int, dtype: torch.dtype, fused: bool
    ) -> None:
        chain = Chain.make(kind, dtype, rows, fused=fused)
        assert_same(chain.run(), chain.plain())

    def test_real_shape(self) -> None:
        chain = Chain.make("ple", torch.bfloat16, 1, hidden=2560)
        assert_same(chain.run(), chain.plain())

    @pytest.mark.parametrize("kind", CHAINS)
    def test_a_prepared_norm_is_reused_and_only_then(self, kind: str, calls: Counter[str]) -> None:
        chain = Chain.make(kind, torch.bfloat16, 2)
        chain.run()
        plain = chain.kinds.count("plain")
        boundaries = len(chain.kinds)
        assert calls == {
            "grouped_gemma_rmsnorm": 1 + boundaries - plain,
            "hc_gate": boundaries,
            "hc_mix": boundaries + 1,
            **({"hc_apply_norm": plain} if plain else {}),
            **({"hc_apply": boundaries - plain} if boundaries > plain else {}),
        }

    @pytest.mark.parametrize("kind", CHAINS)
    def test_a_prepared_gate_spares_the_next_read_its_own(self, kind: str, calls: Counter[str]) -> None:
        chain = Chain.make(kind, torch.bfloat16, 2, fused=True)
        chain.run()
        plain, boundaries = chain.kinds.count("plain"), len(chain.kinds)
        # the final mixer has no gate to prepare
        fused = plain - (chain.kinds[-1] == "plain")
        expected = {
            "grouped_gemma_rmsnorm": 1 + boundaries - plain,
            "hc_gate": boundaries - fused,
            "hc_mix": boundaries + 1,
            "hc_apply_norm": plain - fused,
            "hc_boundary": fused,
            "hc_apply": boundaries - plain,
        }
        assert calls == {op: count for op, count in expected.items() if count}

    def test_interleaved_requests_do_not_mix(self) -> None:
        first = Chain.make("mixed", torch.bfloat16, 3, seed=1)
        second = dataclasses.replace(
            first, residual=random((3, 256), torch.bfloat16, CPU, 77, 3.0), update=-first.update
        )
        *_, (a, b) = zip(first.steps(), second.steps(), strict=True)
        assert_same(a, first.plain())
        assert_same(b, second.plain())
        assert not torch.equal(a, b)

    def test_next_norm_as_a_bare_weight(self) -> None:
        chain = Chain.make("plain", torch.float16, 2)
        first, second = chain.connections[:2]
        x, state = first.read(HCState.start(chain.residual))
        by_weight = first.write(block(x), state, next_norm=second.norm_weight)
        by_connection = first.write(block(x), state, next_norm=second)
        assert_same(by_weight.normed, by_connection.normed)
        assert_same(second.read(by_weight)[0], second.read(by_connection)[0])

    def test_next_norm_uses_the_reader_s_eps(self) -> None:
        chain = Chain.make("plain", torch.float16, 2)
        reader = dataclasses.replace(chain.connections[1], eps=10.0)
        x, state = chain.connections[0].read(HCState.start(chain.residual))
        prepared = chain.connections[0].write(block(x), state, next_norm=reader)
        afresh = HCState.start(prepared.residual)
        assert_same(reader.read(prepared)[0], reader.read(afresh)[0])

    @pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiles_without_a_graph_break(self, backend: str, fused: bool) -> None:
        chain = Chain.make("ple", torch.bfloat16, 3)
        by, reader = chain.connections[:2]

        def boundary(residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
            x, state = by.read(HCState.start(residual))
            inject = reader.inject_weight if fused else None
            x, state = reader.read(by.write(block(x), state, next_norm=reader, next_inject=inject))
            state = reader.write(block(x), state)
            state = state.with_residual(state.residual + update)
            return chain.final.final_read(state), state.residual

        expected = boundary(chain.residual, chain.update)
        got = torch.compile(boundary, fullgraph=True, backend=backend)(chain.residual, chain.update)
        for result, wanted in zip(got, expected, strict=True):
            assert_same(result, wanted)

    def test_states_pass_through_a_compiled_layer(self) -> None:
        chain = Chain.make("plain", torch.bfloat16, 3)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def layer(by: HyperConnection, reader: HyperConnection, state: HCState) -> HCState:
            x, state = by.read(state)
            return by.write(block(x), state, next_norm=reader)

        state = HCState.start(chain.residual)
        for by, reader in zip(chain.connections, [*chain.connections[1:], chain.final], strict=True):
            state = layer(by, reader, state)
        assert_same(chain.final.final_read(state), chain.plain())

    def test_inference_mode(self) -> None:
        chain = Chain.make("mixed", torch.bfloat16, 2)
        with torch.inference_mode():
            got = chain.run()
        assert_same(got, chain.plain())


@pytest.mark.cpu
class TestStateRules:
    @pytest.fixture
    def chain(self) -> Chain:
        return Chain.make("plain", torch.bfloat16, 3)

    def test_immutable(self, chain: Chain) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            HCState.start(chain.residual).residual = chain.update
        with pytest.raises(dataclasses.FrozenInstanceError):
            chain.final.eps = 0.0

    def test_a_step_leaves_its_state_as_it_was(self, chain: Chain) -> None:
        by = chain.connections[0]
        start = HCState.start(chain.residual)
        x, state = by.read(start)
        assert start.normed is None
        assert start.gate_partials is None
        before = [t.clone() for t in (state.residual, state.normed, state.gate_partials)]
        once = by.write(block(x), state, next_norm=chain.final)
        again = by.write(block(x), state, next_norm=chain.final)
        for tensor, copy in zip((state.residual, state.normed, state.gate_partials), before, strict=True):
            assert torch.equal(tensor, copy)
        assert_same(once.residual, again.residual)
        assert_same(once.normed, again.normed)

    def test_read_returns_the_contract_s_parts(self, chain: Chain) -> None:
        by = chain.connections[0]
        x, state = by.read(HCState.start(chain.residual))
        assert x.shape == (3, by.hidden)
        assert state.residual is chain.residual
        assert state.gate_partials.shape == (3, 8, STREAMS)
        assert state.gate_partials.dtype == torch.float32
        assert state.gate_event is None  # no streams on a CPU

    def test_only_the_residual_crosses_a_pipeline_boundary(self, chain: Chain) -> None:
        by = chain.connections[0]
        x, state = by.read(HCState.start(chain.residual))
        with pytest.raises(InvalidArgument, match="pipeline boundary between a read and its write"):
            state.to_wire()
        written = by.write(block(x), state, next_norm=chain.final)
        arrived = HCState.from_wire(written.to_wire())
        assert arrived.residual is written.residual
        assert arrived.normed is None
        assert arrived.gate_partials is None

    def test_a_prepared_norm_does_not_outlive_its_residual(self, chain: Chain) -> None:
        by = chain.connections[0]
        x, read = by.read(HCState.start(chain.residual))
        state = by.write(block(x), read, next_norm=chain.final)
        changed = state.residual + chain.update
        assert state.with_residual(changed).normed is None
        with pytest.raises(InvalidArgument, match="residual: normed was prepared from another residual"):
            dataclasses.replace(state, residual=changed)
        with pytest.raises(InvalidArgument, match="residual: changed between a read and its write"):
            read.with_residual(changed)
        state.residual.add_(chain.update)
        with pytest.raises(InvalidArgument, match=r"state\.residual: changed in place"):
            chain.final.final_read(state)

    def test_a_residual_changed_in_place_between_read_and_write(self, chain: Chain) -> None:
        by = chain.connections[0]
        x, state = by.read(HCState.start(chain.residual))
        chain.residual.mul_(2)
        with pytest.raises(InvalidArgument, match=r"state\.residual: changed in place"):
            by.write(block(x), state)

    def test_a_state_serves_the_connection_it_was_made_for(self, chain: Chain) -> None:
        first, second, third = chain.connections[:3]
        x, state = first.read(HCState.start(chain.residual))
        with pytest.raises(InvalidArgument, match="state: was prepared for another HyperConnection"):
            second.write(block(x), state)
        written = first.write(block(x), state, next_norm=second)
        with pytest.raises(InvalidArgument, match="state: was prepared for another HyperConnection"):
            third.read(written)

    def test_a_prepared_gate_serves_the_connection_it_was_made_for(self, chain: Chain) -> None:
        first, second, third = chain.connections[:3]
        x, state = first.read(HCState.start(chain.residual))
        written = first.write(block(x), state, second, second.inject_weight)
        with pytest.raises(InvalidArgument, match="state: was prepared for another HyperConnection"):
            third.read(written)
        bare = first.write(block(x), state, second.norm_weight, second.inject_weight)
        with pytest.raises(InvalidArgument, match="state: its gate was prepared with another inject weight"):
            third.read(bare)
        for prepared in (written, bare):
            assert_same(second.read(prepared)[0], second.read(HCState.start(written.residual))[0])

    def test_a_prepared_gate_does_not_outlive_its_residual(self, chain: Chain) -> None:
        by, reader = chain.connections[:2]
        x, state = by.read(HCState.start(chain.residual))
        written = by.write(block(x), state, reader, reader.inject_weight)
        assert written.next_partials is not None
        assert written.gate_event is None
        changed = written.residual + chain.update
        assert written.with_residual(changed).next_partials is None
        assert HCState.from_wire(written.to_wire()).next_partials is None
        with pytest.raises(InvalidArgument, match="residual: normed was prepared from another residual"):
            dataclasses.replace(written, residual=changed)
        _, read = reader.read(written)
        assert read.gate_partials is written.next_partials
        assert read.next_partials is None
        written.residual.add_(chain.update)
        with pytest.raises(InvalidArgument, match=r"state\.residual: changed in place"):
            reader.read(written)

    def test_write_takes_no_state_that_was_only_prepared(self, chain: Chain) -> None:
        by, reader = chain.connections[:2]
        x, state = by.read(HCState.start(chain.residual))
        written = by.write(block(x), state, reader, reader.inject_weight)
        with pytest.raises(InvalidArgument, match="state: has no gate partials"):
            reader.write(block(x), written)

    def test_write_needs_a_read(self, chain: Chain) -> None:
        by = chain.connections[0]
        with pytest.raises(
            InvalidArgument, match="state: has no gate partials; write takes the state that read"
        ):
            by.write(torch.zeros(3, by.hidden, dtype=torch.bfloat16), HCState.start(chain.residual))

    def test_read_needs_a_write(self, chain: Chain) -> None:
        by = chain.connections[0]
        _, state = by.read(HCState.start(chain.residual))
        for read in (by.read, by.final_read):
            with pytest.raises(InvalidArgument, match="state: was read already; write it"):
                read(state)

    def test_the_final_mixer_never_writes(self, chain: Chain) -> None:
        with pytest.raises(InvalidArgument, match="inject_weight: this connection has none"):
            chain.final.read(HCState.start(chain.residual))


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.cpu
class TestValidation:
    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            (dict(residual=None), "^residual: got a NoneType, allowed a torch.Tensor"),
            (dict(normed=[1.0]), "^normed: got a list, allowed a torch.Tensor"),
            (
                dict(normed=_zeros(3, 256), gate_partials=1.0),
                "^gate_partials: got a float, allowed a torch.Tensor",
            ),
            (dict(residual=_zeros(256)), r"^residual: got shape \[256\], allowed \[T, C\*H\]"),
            (dict(normed=_zeros(2, 256)), r"^normed: got shape \[2, 256\], allowed \[3, 256\]"),
            (
                dict(normed=_zeros(3, 256, dtype=torch.float16)),
                "^normed: got torch.float16, allowed torch.bfloat16",
            ),
            (dict(normed=_zeros(3, 256, device="meta")), "^normed: on meta, allowed cpu"),
            (
                dict(gate_partials=_zeros(3, 8, 4, dtype=torch.float32)),
                "^gate_partials: given without normed",
            ),
            (
                dict(normed=_zeros(3, 256), gate_partials=_zeros(2, 8, 4, dtype=torch.float32)),
                r"^gate_partials: got shape \[2, 8, 4\], allowed \[3, 8, C\]",
            ),
            (
                dict(normed=_zeros(3, 256), gate_partials=_zeros(3, 8, 4)),
                "^gate_partials: got torch.bfloat16",
            ),
            (
                dict(next_partials=_zeros(3, 8, 4, dtype=torch.float32)),
                "^next_partials: given without normed",
            ),
            (
                dict(normed=_zeros(3, 256), next_partials=_zeros(3, 7, 4, dtype=torch.float32)),
                r"^next_partials: got shape \[3, 7, 4\], allowed \[3, 8, C\]",
            ),
            (
                dict(
                    normed=_zeros(3, 256),
                    gate_partials=_zeros(3, 8, 4, dtype=torch.float32),
                    next_partials=_zeros(3, 8, 4, dtype=torch.float32),
                ),
                "^next_partials: given with gate_partials",
            ),
        ],
    )
    def test_state(self, parts: dict[str, Tensor], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            HCState(**{"residual": _zeros(3, 256), **parts})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(gate_stream="aside"), "^gate_stream: got 'aside', allowed one of side, main"),
            (dict(norm_weight=_zeros(4, 64)), r"^norm_weight: got shape \[4, 64\]"),
            (dict(streams=3), "^streams: got 3, allowed a divisor of the width 256"),
            (dict(streams=0), "^streams: got 0"),
            (dict(streams=4.0), "^HyperConnection: streams: got 4.0, allowed an integer"),
            (dict(streams=True), "^HyperConnection: streams: got True, allowed an integer"),
            (dict(eps=-1e-6), "^eps: got -1e-06, allowed a finite number >= 0"),
            (dict(eps=float("nan")), "^HyperConnection: eps: got nan, allowed a finite number"),
            (dict(eps="0"), "^HyperConnection: eps: got '0', allowed a finite number"),
            (dict(norm_weight=None), "^norm_weight: got a NoneType, allowed a torch.Tensor"),
            (dict(inject_weight=1), "^inject_weight: got a int, allowed a torch.Tensor"),
            (dict(w_down=None), "^w_down: got a NoneType, allowed a torch.Tensor"),
            (dict(w_down=_zeros(256)), r"^w_down: got shape \[256\], allowed \[R, 256\]"),
            (dict(w_up=[0.0]), "^w_up: got a list, allowed a torch.Tensor"),
            (
                dict(norm_weight=_zeros(256, dtype=torch.float32)),
                "^norm_weight: got torch.float32, allowed torch.bfloat16 or torch.float16",
            ),
            (dict(w_down=_zeros(16, 128)), r"^w_down: got shape \[16, 128\], allowed \[16, 256\]"),
            (dict(w_up=_zeros(16, 256)), r"^w_up: got shape \[16, 256\], allowed \[256, 16\]"),
            (
                dict(w_up=_zeros(256, 16, dtype=torch.float16)),
                "^w_up: got torch.float16, allowed torch.bfloat16",
            ),
            (dict(inject_weight=_zeros(3, 256)), r"^inject_weight: got shape \[3, 256\], allowed \[4, 256\]"),
            (dict(inject_weight=_zeros(4, 256, device="meta")), "^inject_weight: on meta, allowed cpu"),
        ],
    )
    def test_connection(self, changes: dict[str, object], message: str) -> None:
        good = connection(torch.bfloat16, CPU, 0)
        with pytest.raises(InvalidArgument, match=message):
            dataclasses.replace(good, **changes)

    @pytest.mark.parametrize(
        ("residual", "message"),
        [
            (_zeros(3, 128), r"^state\.residual: got shape \[3, 128\], allowed \[3, 256\]"),
            (_zeros(3, 256, dtype=torch.float16), r"^state\.residual: got torch.float16"),
            (_zeros(3, 256, device="meta"), r"^state\.residual: on meta, allowed cpu"),
        ],
    )
    def test_a_state_of_another_model_or_device(self, residual: Tensor, message: str) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        state = HCState.start(residual)
        for step in (by.read, by.final_read, lambda s: by.write(_zeros(3, 64), s)):
            with pytest.raises(InvalidArgument, match=message):
                step(state)

    @pytest.mark.parametrize(
        ("block_out", "message"),
        [
            (_zeros(2, 64), r"^block_out: got shape \[2, 64\], allowed \[3, 64\]"),
            (_zeros(3, 256), r"^block_out: got shape \[3, 256\], allowed \[3, 64\]"),
            (_zeros(3, 64, dtype=torch.float16), "^block_out: got torch.float16, allowed torch.bfloat16"),
            (_zeros(3, 64, device="meta"), "^block_out: on meta, allowed cpu"),
        ],
    )
    def test_a_block_of_another_request(self, block_out: Tensor, message: str) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        _, state = by.read(HCState.start(_zeros(3, 256)))
        with pytest.raises(InvalidArgument, match=message):
            by.write(block_out, state)

    @pytest.mark.parametrize(
        ("next_norm", "message"),
        [
            (
                HyperConnection(_zeros(256), None, _zeros(16, 256), _zeros(256, 16), streams=2),
                "^next_norm: got 2 streams, allowed 4",
            ),
            (_zeros(128), r"^next_norm: got shape \[128\], allowed \[256\]"),
            ("next", "^next_norm: got a str, allowed a torch.Tensor"),
        ],
    )
    def test_a_next_norm_that_does_not_fit(self, next_norm: object, message: str) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        _, state = by.read(HCState.start(_zeros(3, 256)))
        with pytest.raises(InvalidArgument, match=message):
            by.write(_zeros(3, 64), state, next_norm)

    @pytest.mark.parametrize(
        ("next_norm", "next_inject", "message"),
        [
            (None, _zeros(4, 256), "^next_inject: given without next_norm"),
            (_zeros(256), _zeros(3, 256), r"^next_inject: got shape \[3, 256\], allowed \[4, 256\]"),
            (_zeros(256), _zeros(4, 256, dtype=torch.float16), "^next_inject: got torch.float16"),
            (_zeros(256), 1.0, "^next_inject: got a float, allowed a torch.Tensor"),
            (
                HyperConnection(_zeros(256), _zeros(4, 256), _zeros(16, 256), _zeros(256, 16)),
                _zeros(4, 256),
                "^next_inject: got another tensor than next_norm's own inject_weight",
            ),
        ],
    )
    def test_a_next_inject_that_does_not_fit(
        self, next_norm: object, next_inject: object, message: str
    ) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        _, state = by.read(HCState.start(_zeros(3, 256)))
        with pytest.raises(InvalidArgument, match=message):
            by.write(_zeros(3, 64), state, next_norm, next_inject)

    def test_prepared_partials_of_other_streams(self) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        partials = _zeros(3, 8, 2, dtype=torch.float32)
        state = HCState(_zeros(3, 256), _zeros(3, 256), next_partials=partials)
        with pytest.raises(InvalidArgument, match=r"^state\.next_partials: got 2 streams, allowed 4"):
            by.read(state)

    def test_no_state(self) -> None:
        with pytest.raises(InvalidArgument, match=r"^state: got a Tensor, allowed an HCState$"):
            connection(torch.bfloat16, CPU, 0).read(_zeros(3, 256))

    def test_partials_of_other_streams(self) -> None:
        by = connection(torch.bfloat16, CPU, 0)
        state = HCState(_zeros(3, 256), _zeros(3, 256), _zeros(3, 8, 2, dtype=torch.float32))
        with pytest.raises(InvalidArgument, match=r"^state\.gate_partials: got 2 streams, allowed 4"):
            by.write(_zeros(3, 64), state)

    def test_a_replaced_residual_of_another_shape(self) -> None:
        with pytest.raises(InvalidArgument, match=r"^residual: got shape \[4, 256\], allowed \[3, 256\]"):
            HCState.start(_zeros(3, 256)).with_residual(_zeros(4, 256))
