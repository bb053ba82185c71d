"""What dispatch passes is what the kernels are compiled for: argument by argument, for every variant, without
compiling."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bindings import kernels
from bindings.checks import ALIGNMENT
from bindings.registry import DTYPE_NAMES, OPS, Kernel, ModelConfig
from cute_kernels.hyper import mix_plan
from tests.bindings.calls import WORKSPACES

DSL_NAMES = {"BFloat16": "bf16", "Float16": "fp16", "Float32": "fp32", "Int32": "int32", "Int64": "int64"}

# Validated to their element's alignment only; all other tensors start at multiples of 16 bytes.
ELEMENT_ALIGNED = {"a", "b", "A_log", "dt_bias", "state_indices"}


def configs(kernel: Kernel) -> list[ModelConfig]:
    """The default model in every combination of what the operator's variants depend on."""
    axes = OPS[kernel.op].axes
    return [replace(ModelConfig(), **dict(zip(axes, v, strict=True))) for v in product(*axes.values())]


def assert_fits(name: str, given: Tensor, compiled_for: Any, vec_bytes: int | None) -> None:
    """A tensor of a call against the tensor without data that its kernel is compiled against."""
    assert compiled_for is not None, f"{name} is given but compiled as absent"
    assert DSL_NAMES[compiled_for.element_type.__name__] == DTYPE_NAMES[given.dtype], name
    assert len(compiled_for.shape) == given.dim(), name
    for have, fixed in ((given.shape, compiled_for.shape), (given.stride(), compiled_for.stride)):
        for size, want in zip(have, fixed, strict=True):
            assert not isinstance(want, int) or size == want, f"{name}: {have}, compiled for {fixed}"
    promised = vec_bytes or (given.element_size() if name in ELEMENT_ALIGNED else ALIGNMENT)
    assert compiled_for._assumed_align <= promised, f"{name}: aligned less than compiled for"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kernel", [k for k in kernels.TABLE if isinstance(k, Kernel)], ids=lambda k: k.op)
def test_arguments(kernel: Kernel, target: str) -> None:
    """Inputs (None where absent), outputs, scalars, and the stream, which the caller does not pass."""
    op, build = OPS[kernel.op], importlib.import_module(kernel.module).build
    for config in configs(kernel):
        arguments = op.new_call(config, 3, "meta")
        call = op.examine(arguments, concrete=False)
        params = kernel.specialise(call, target)
        _, compiled_for = build(target, **params)
        *fakes, stream = compiled_for
        assert "Stream" in type(stream).__name__
        outs = [torch.empty(o.shape, dtype=o.dtype, device="meta") for o in call.outputs]
        passed = [*arguments.inputs, *outs, *call.kernel_scalars]
        names = [*op.inputs, *(o.name for o in call.outputs), *("scalar" for _ in call.kernel_scalars)]
        if kernel.op in WORKSPACES:  # in place of scalars: all of them are parameters
            plan = mix_plan.plan(*(params[n] for n in ("hidden", "streams", "low_rank", "bucket")), target)
            assert isinstance(plan, mix_plan.MixPlan)
            passed[len(op.inputs) + 1 :] = [
                torch.empty(plan.workspace_words, dtype=torch.int64, device="meta")
            ]
            names[len(op.inputs) + 1 :] = ["workspace"]
        for name, given, fake in zip(names, passed, fakes, strict=True):
            if isinstance(given, Tensor):
                vec_bytes = params["vec_bytes"] if name in kernel.vectors else None
                assert_fits(name, given, fake, vec_bytes)
            elif given is None:
                assert fake is None, f"{name} is absent but compiled as given"
            else:
                assert isinstance(given, float)
                assert type(fake).__name__ == "Float32"
