"""What a captured CUDA graph holds, asked of the driver: the names of the kernels that a replay launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


def kernel_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The (mangled) name of every kernel node of a graph that was made with `keep_graph=True`, in no order.

    Raises RuntimeError where the driver refuses, ImportError without cuda-python.
    """
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    (count,) = _ok(driver.cuGraphGetNodes(handle))[-1:]
    nodes = _ok(driver.cuGraphGetNodes(handle, count))[0]
    names = []
    for node in nodes:
        if _ok(driver.cuGraphNodeGetType(node))[0] != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        params = _ok(driver.cuGraphKernelNodeGetParams(node))[0]
        # A node names either a function or, launched through a library, a kernel.
        name = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
        names.append(_ok(name)[0].decode())
    return names


def count_by_kernel(names: Iterable[str], kernels: Iterable[str]) -> Counter[str]:
    """How many of `names` belong to each of our `kernels`; the rest count as "other".

    The compiler names a kernel after the object that it was traced from: `hc_apply_norm` is the class
    HcApplyNorm.
    """
    marks = {kernel: "".join(map(str.capitalize, kernel.split("_"))) + "_object" for kernel in kernels}
    counts: Counter[str] = Counter()
    for name in names:
        counts[next((kernel for kernel, mark in marks.items() if mark in name), "other")] += 1
    return counts


def _ok(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return tuple(values)
