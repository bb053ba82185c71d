"""`torch.ops.flashnext`: schemas, fake implementations, opcheck, torch.compile, and what makes a registration
complete."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from bindings import InvalidArgument, backend, dispatch, kernels, ops, plans, reference
from bindings.registry import IMPLEMENTATIONS, OPS, Kernel, ModelConfig
from tests.bindings.calls import SMALL, Call, Jit, make, outs_of, run, tensors
from tests.cases import cases

ALL = list(OPS)

SIGNATURES = {
    "grouped_gemma_rmsnorm": "(Tensor x, Tensor weight, float eps=1e-06, int group_size=2560) -> Tensor",
    "hc_gate": "(Tensor normed, Tensor inject_weight) -> Tensor",
    "hc_apply": "(Tensor block, Tensor residual, Tensor partials) -> Tensor",
    "hc_apply_norm": "(Tensor block, Tensor residual, Tensor partials, Tensor norm_weight, float eps=1e-06) "
    "-> (Tensor, Tensor)",
    "hc_boundary": "(Tensor block, Tensor residual, Tensor partials, Tensor norm_weight, "
    "Tensor inject_weight, float eps=1e-06) -> (Tensor, Tensor, Tensor)",
    "hc_mix": "(Tensor normed, Tensor w_down, Tensor w_up, int streams=4) -> Tensor",
    "shared_gate": "(Tensor x, Tensor weight) -> Tensor",
    "moe_finalize": "(Tensor expert_out, Tensor permuted_idx, Tensor expert_weights, "
    "Tensor? shared_out=None, Tensor? shared_gate=None) -> Tensor",
    "gdn_packed_decode": "(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor(a!) state, Tensor state_indices, float? scale=None) -> Tensor",
}


def overload(op: str, out: bool) -> Callable[..., Any]:
    packet = getattr(torch.ops.flashnext, op)
    return packet.out if out else packet.default  # type: ignore[no-any-return]


def positional(op: str, call: Call) -> tuple[Any, ...]:
    return tuple(call[n] for n in (*OPS[op].inputs, *OPS[op].scalars))


@pytest.mark.parametrize("op", ALL)
def test_schema(op: str) -> None:
    """The contract's arguments; `.out` writes to keyword-only tensors and returns nothing; only those and the
    GDN state are declared as written."""
    declared = torch._C.parse_schema(f"flashnext::{op}{SIGNATURES[op]}")
    assert overload(op, False)._schema == declared  # type: ignore[attr-defined]
    schema = overload(op, True)._schema  # type: ignore[attr-defined]
    assert list(schema.returns) == []
    outs = [a for a in schema.arguments if a.kwarg_only]
    assert tuple(a.name for a in outs) == OPS[op].outs
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {*OPS[op].outs, *OPS[op].mutates}
    assert [a.name for a in schema.arguments if not a.kwarg_only] == [a.name for a in declared.arguments]


@pytest.mark.parametrize("op", ALL)
def test_registration_is_complete(op: str) -> None:
    """An operator has one signature everywhere, a reference, an implementation, and a table of test cases."""
    function, operator = getattr(ops, op), OPS[op]
    public = inspect.signature(function)
    assert list(public.parameters) == list(operator.signature.parameters)
    for name, parameter in public.parameters.items():
        assert (parameter.default, parameter.kind) == (
            operator.signature.parameters[name].default,
            operator.signature.parameters[name].kind,
        )
    assert op in ops.__all__
    assert function.__doc__
    referenced = inspect.signature(getattr(reference, op)).parameters
    assert list(referenced) == [*operator.inputs, *operator.scalars]
    assert [p.default for p in referenced.values()] == [
        operator.signature.parameters[n].default for n in referenced
    ]
    assert IMPLEMENTATIONS[op]
    assert cases(op)
    assert SIGNATURES[op]


@pytest.mark.parametrize(
    "kernel", [k for k in kernels.TABLE if isinstance(k, Kernel)], ids=lambda k: k.module
)
def test_kernel_module_fits_its_registration(kernel: Kernel) -> None:
    """`build` takes the target and exactly the parameters that the registration gives. Read, not imported: no
    compiler."""
    spec = importlib.util.find_spec(kernel.module.rpartition(".")[0])
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / f"{kernel.module.rpartition('.')[2]}.py"
    functions = [
        n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "build"
    ]
    (build,) = functions
    assert [a.arg for a in build.args.args] == ["target"]
    given = next(kernel.variants("sm_100a"))
    assert {a.arg for a in build.args.kwonlyargs} == set(given)
    for value in given.values():
        assert type(value) in (str, int, bool)
    assert set(kernel.vectors) <= {*OPS[kernel.op].inputs, *OPS[kernel.op].outs}
    assert set(kernel.tuning) <= set(given)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_precompile_configs(target: str) -> None:
    """A sample with every kernel, dtype and tuning value, once each, few enough for every CI run."""
    found = list(kernels.precompile_configs(target, sample=True))
    keys = [(module, tuple(sorted(params.items()))) for _, module, params in found]
    assert len(set(keys)) == len(keys)
    assert len(keys) <= 75
    collectives = {"all_reduce", "moe_finalize_all_reduce"}
    registered = {k.op for k in kernels.TABLE if isinstance(k, Kernel)}
    assert {op for op, _, _ in found} == registered | collectives
    widths = {16} if target == "sm_90a" else {16, 32}
    for op in registered - {"hc_mix"}:  # which has a bucket of rows in place of a vector width
        assert {p["vec_bytes"] for o, _, p in found if o == op} == widths
    by_field = {
        (op, name): {p[name] for o, _, p in found if o == op} for op, _, params in found for name in params
    }
    assert by_field["hc_gate", "dtype"] == {"bf16", "fp16"}
    assert by_field["hc_mix", "bucket"] == {8, 16, 32}
    assert by_field["hc_mix", "launch"] == {"cooperative", "split"}
    assert by_field["gdn_packed_decode", "value_tile"] == set(kernels.VALUE_TILES)
    assert by_field["gdn_packed_decode", "state_dtype"] == {"fp32", "bf16"}
    assert by_field["gdn_packed_decode", "index_dtype"] == {"int32", "int64"}
    assert by_field["gdn_packed_decode", "bias_dtype"] == {"fp32", "bf16", "fp16"}
    assert by_field["moe_finalize", "weight_dtype"] == {"fp32", "bf16"}
    shared = {(p["shared"], p["gated"]) for o, _, p in found if o == "moe_finalize"}
    assert shared == {(True, True), (True, False), (False, False)}
    assert by_field["grouped_gemma_rmsnorm", "width"] == {10240}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("model", [ModelConfig(), ModelConfig(key_heads=8, value_heads=24, streams=2)])
def test_precompile_configs_hold_all_that_calls_ask_for(target: str, model: ModelConfig) -> None:
    held = {(op, frozenset(p.items())) for op, _, p in kernels.precompile_configs(target, model)}
    for kernel in kernels.TABLE:
        if not isinstance(kernel, Kernel):
            continue
        op = OPS[kernel.op]
        for values in itertools.product(*op.axes.values()):
            config = replace(model, **dict(zip(op.axes, values, strict=True)))
            for rows in (1, 8, 9, 33, 86, 257):
                call = op.examine(op.new_call(config, rows, "meta"), concrete=False)
                if not all(guard.holds(call) for guard in kernel.guards):
                    continue
                asked = kernel.specialise(call, target)
                for width in {asked.get("vec_bytes"), 16} if "vec_bytes" in asked else ():
                    assert (op.name, frozenset({**asked, "vec_bytes": width}.items())) in held
                assert (op.name, frozenset(asked.items())) in held


def test_precompile_configs_of_an_unknown_target() -> None:
    with pytest.raises(ValueError, match="target: got 'sm_80', allowed sm_90a, sm_100a, sm_103a"):
        list(kernels.precompile_configs("sm_80"))


@pytest.mark.parametrize("out", [False, True], ids=["functional", "out"])
@pytest.mark.parametrize("op", ALL)
def test_opcheck(op: str, out: bool) -> None:
    call = make(op)
    outs = outs_of(op, call) if out else {}
    results = torch.library.opcheck(overload(op, out), positional(op, call), outs)
    assert set(results.values()) == {"SUCCESS"}
    assert "test_aot_dispatch_dynamic" in results


@pytest.mark.parametrize("form", ["plain", "none"])
def test_opcheck_of_absent_arguments(form: str) -> None:
    call = make("moe_finalize", config=ModelConfig(hidden=64, top_k=3, shared=form))
    present = tuple(v for v in call.values() if v is not None)
    assert len(present) == (4 if form == "plain" else 3)
    results = torch.library.opcheck(torch.ops.flashnext.moe_finalize.default, present)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ALL)
def test_dispatcher_gives_the_same_bits(op: str) -> None:
    """torch.ops, functional and `.out`, with and without trailing defaults, against `bindings.ops`."""
    call = make(op)
    expected_state = call.get("state", torch.empty(0)).clone()
    expected = run(op, call | ({"state": expected_state} if "state" in call else {}))
    results = overload(op, False)(*positional(op, make(op)))
    results = results if isinstance(results, tuple) else (results,)
    outs = outs_of(op, call)
    again = make(op)
    assert overload(op, True)(*positional(op, again), **outs) is None
    for want, fresh, written in zip(expected, results, outs.values(), strict=True):
        assert torch.equal(want, fresh)
        assert torch.equal(want, written)
    if "state" in again:
        assert torch.equal(again["state"], expected_state)


@pytest.mark.parametrize("mode", ["fake", "meta"])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("op", ALL)
def test_fake_results(op: str, rows: int, mode: str) -> None:
    """Shapes, dtypes and contiguous strides of the results without data, also for strided inputs, from
    `bindings.ops`."""
    call = make(op, rows)
    real = run(op, make(op, rows))
    if mode == "meta":
        fakes = run(op, {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in call.items()})
    else:
        with FakeTensorMode() as fake_mode:
            fakes = run(
                op, {n: fake_mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in call.items()}
            )
    for fake, result in zip(fakes, real, strict=True):
        assert fake.shape == result.shape
        assert fake.dtype == result.dtype
        assert fake.stride() == result.stride()
        assert fake.is_contiguous()
        assert fake.device.type == ("meta" if mode == "meta" else "cpu")


def test_fake_results_of_strided_inputs() -> None:
    call = make("gdn_packed_decode")
    wide = torch.zeros(3, 1024, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in call.items()}
        fakes["mixed_qkv"] = mode.from_tensor(wide)[:, 64 : 64 + call["mixed_qkv"].shape[1]]
        out = ops.gdn_packed_decode(**fakes)
    assert (out.shape, out.stride()) == ((3, 1, 4, 64), (256, 256, 64, 1))


@pytest.mark.parametrize("op", ALL)
def test_symbolic_rows(op: str) -> None:
    """One graph serves every number of rows: nothing in the fake implementation pins T."""
    names = list(tensors(make(op)))
    scalars = {n: v for n, v in make(op).items() if n in OPS[op].scalars}

    def function(*values: Tensor) -> Any:
        return getattr(ops, op)(**dict(zip(names, values, strict=True)), **scalars)

    graph = make_fx(function, tracing_mode="symbolic")(*tensors(make(op, 4)).values())
    assert any(n.target is overload(op, False) for n in graph.graph.nodes)
    for rows in (2, 7):
        mine, theirs = make(op, rows), make(op, rows)
        results = graph(*tensors(mine).values())
        results = results if isinstance(results, tuple) else (results,)
        for got, want in zip(results, run(op, theirs), strict=True):
            assert torch.equal(got, want)


def test_fake_implementation_validates() -> None:
    call = make("hc_gate")
    with FakeTensorMode() as mode:
        normed, weight = (mode.from_tensor(call[n]) for n in ("normed", "inject_weight"))
        with pytest.raises(InvalidArgument, match=r"^hc_gate: inject_weight: got shape"):
            ops.hc_gate(normed, weight[:, :64])
        with pytest.raises(InvalidArgument, match=r"^hc_gate: out: got dtype torch.bfloat16"):
            ops.hc_gate(normed, weight, out=mode.from_tensor(torch.zeros(3, 8, 4, dtype=torch.bfloat16)))


def test_dispatcher_validates() -> None:
    """torch.ops with real tensors raises what `bindings.ops` does."""
    call = make("hc_gate")
    with pytest.raises(InvalidArgument, match=r"^hc_gate: inject_weight: got shape"):
        torch.ops.flashnext.hc_gate(call["normed"], call["inject_weight"][:, :64])
    same = torch.zeros(3, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match=r"^hc_apply: out: got memory that overlaps block"):
        torch.ops.flashnext.hc_apply.out(same, same.clone(), torch.zeros(3, 8, 1), out=same)


class Seen(TorchDispatchMode):
    """Records the operators that torch's dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("matcher", ["native_matcher", "python_matcher"])
def test_modes_and_tracers_see_the_operator(matcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever intercepts operators sees ours, although plain calls go past torch's dispatcher and have left
    a plan."""
    monkeypatch.setattr(plans, "matcher", getattr(plans, matcher))
    dispatch.clear_plans()
    call = make("hc_gate")
    out = torch.empty(3, 8, 4)
    ops.hc_gate(**call)
    ops.hc_gate(**call, out=out)
    with Seen() as seen:
        ops.hc_gate(**call)
        ops.hc_gate(**call, out=out)
    assert [o for o in seen.ops if o.startswith("flashnext")] == [
        "flashnext.hc_gate.default",
        "flashnext.hc_gate.out",
    ]
    traced = torch.jit.trace(lambda n, w: ops.hc_gate(n, w), tuple(call.values()), check_trace=False)
    assert "flashnext::hc_gate" in str(traced.graph)
    assert torch.equal(ops.hc_gate(**call), out)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap() -> None:
    call = make("shared_gate", 6)
    expected = ops.shared_gate(**call)
    batched = torch.func.vmap(lambda x: ops.shared_gate(x, call["weight"]))(call["x"].view(2, 3, -1))
    assert torch.equal(batched.flatten(), expected)


def test_tensor_subclass() -> None:
    """A subclass keeps its type, and parameters are plain tensors."""

    class Marked(Tensor):
        pass

    call = make("shared_gate")
    expected = ops.shared_gate(**call)
    marked = ops.shared_gate(call["x"].as_subclass(Marked), call["weight"])
    assert type(marked) is Marked
    assert torch.equal(marked.as_subclass(Tensor), expected)
    parameter = torch.nn.Parameter(call["weight"])
    result = ops.shared_gate(call["x"], parameter)
    assert type(result) is Tensor
    assert not result.requires_grad
    assert torch.equal(result, expected)


def boundary(
    block: Tensor, residual: Tensor, normed: Tensor, weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer boundary: gate, apply and norm, mix."""
    partials = ops.hc_gate(normed, weights["inject_weight"])
    combined, normed = ops.hc_apply_norm(block, residual, partials, weights["norm_weight"], eps=1e-6)
    return combined, normed, ops.hc_mix(normed, weights["w_down"], weights["w_up"])


def boundary_in_place(
    block: Tensor, residual: Tensor, normed: Tensor, weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, the residual updated in place."""
    partials = torch.empty(block.shape[0], 8, 4)
    ops.hc_gate(normed, weights["inject_weight"], out=partials)
    following = torch.empty_like(normed)
    ops.hc_apply_norm(
        block, residual, partials, weights["norm_weight"], combined_out=residual, normed_out=following
    )
    return residual, following, ops.hc_mix(following, weights["w_down"], weights["w_up"])


def boundary_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    fused, mix = make("hc_apply_norm", rows), make("hc_mix", rows)
    weights = {
        "inject_weight": make("hc_gate", rows)["inject_weight"],
        "norm_weight": fused["norm_weight"],
        "w_down": mix["w_down"],
        "w_up": mix["w_up"],
    }
    return fused["block"], fused["residual"], mix["normed"], weights


@pytest.mark.parametrize("function", [boundary, boundary_in_place])
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "backend_name",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"
            ),
        ),
    ],
)
def test_compile_of_a_layer_boundary(backend_name: str, function: Callable[..., Any]) -> None:
    """Without a graph break, for static and then dynamic rows, equal to eager bit for bit."""
    torch._dynamo.reset()
    compiled_function = torch.compile(function, fullgraph=True, backend=backend_name)
    for rows in (3, 3, 5, 9):
        expected_inputs, inputs = boundary_inputs(rows), boundary_inputs(rows)
        expected = function(*expected_inputs)
        for got, want in zip(compiled_function(*inputs), expected, strict=True):
            assert torch.equal(got, want)
        assert torch.equal(inputs[1], expected_inputs[1])


def test_compile_of_decode() -> None:
    """The GDN state is updated in place through a compiled graph, and the optional arguments of the finalize
    work."""

    def step(gdn: Call, moe: Call) -> tuple[Tensor, Tensor]:
        return ops.gdn_packed_decode(**gdn), ops.moe_finalize(**moe)

    torch._dynamo.reset()
    for form in ("gated", "plain", "none"):
        config = ModelConfig(hidden=64, top_k=3, shared=form)
        gdn, moe = make("gdn_packed_decode"), make("moe_finalize", config=config)
        again = make("gdn_packed_decode")
        expected = step(gdn, moe)
        results = torch.compile(step, fullgraph=True, backend="aot_eager")(again, moe)
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)
        assert torch.equal(again["state"], gdn["state"])


def test_compile_sees_invalid_arguments() -> None:
    torch._dynamo.reset()
    call = make("hc_gate")
    with pytest.raises(Exception, match="hc_gate: inject_weight: got shape"):
        torch.compile(ops.hc_gate, fullgraph=True, backend="eager")(
            call["normed"], call["inject_weight"][:, :64]
        )


def test_compiled_graphs_run_the_selected_backend(compiled: Jit) -> None:
    """The backend is chosen when a graph runs, not when it is traced."""
    torch._dynamo.reset()
    call = make("hc_gate")
    expected = reference.hc_gate(**call)
    function = torch.compile(ops.hc_gate, fullgraph=True, backend="eager")
    with backend("reference"):
        assert torch.equal(function(**call), expected)
    assert compiled.launches == 0
    function(**call)
    assert compiled.launches == 1


def test_version_counters() -> None:
    """Writes behind autograd's back are counted as if torch had made them."""
    call = make("gdn_packed_decode")
    out = torch.empty(3, 1, 4, 64, dtype=torch.bfloat16)
    for use, names in (
        (lambda: ops.gdn_packed_decode(**call), 1),
        (lambda: ops.gdn_packed_decode(**call, out=out), 2),
    ):
        before = call["state"]._version, out._version
        use()
        assert call["state"]._version > before[0]
        assert (out._version > before[1]) == (names == 2)


def test_version_counters_of_kernels(compiled: Jit) -> None:
    test_version_counters()
    assert compiled.launches == 2
    residual = make("hc_apply")
    before = residual["residual"]._version
    ops.hc_apply(**residual, out=residual["residual"])
    ops.hc_apply(**residual, out=residual["residual"])
    assert residual["residual"]._version == before + 2
    with torch.inference_mode():
        call = make("hc_apply")  # inference tensors have no counter
        ops.hc_apply(**call, out=call["residual"])
    assert compiled.launches == 5


@pytest.mark.parametrize("path", ["reference", "auto"])
@pytest.mark.parametrize("op", OPS)
def test_inference_tensors_outside_inference_mode(op: str, path: str, compiled: Jit) -> None:
    """They are read and written as others are, again and again; results are plain tensors."""
    with torch.inference_mode():
        inference = make(op)
        outs = outs_of(op, inference)
    plain, expected = make(op), {name: torch.empty_like(out) for name, out in outs.items()}
    with backend(path):
        for _ in range(2):
            assert not any(result.is_inference() for result in run(op, inference))
            run(op, inference, **outs)
            getattr(torch.ops.flashnext, op).out(*inference.values(), **outs)
            run(op, plain)
            run(op, plain, **expected)
            run(op, plain, **expected)
    if path == "reference":
        for name, out in outs.items():
            assert torch.equal(out, expected[name]), name
        assert "state" not in plain or torch.equal(inference["state"], plain["state"])
    else:
        assert compiled.launches == 12


def test_small_config_is_within_the_guards() -> None:
    """The small model that these tests call is one that kernels would take."""
    for op in ALL:
        operator = OPS[op]
        call = operator.examine(operator.new_call(SMALL, 1, "cpu"))
        for implementation in IMPLEMENTATIONS[op]:
            assert all(g.holds(call) for g in implementation.guards)
