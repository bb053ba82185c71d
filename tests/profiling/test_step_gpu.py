"""The frame of the decode step on a GPU, against the same functions in torch; and a small step from its
command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from profiling import decode_step, peers
from profiling.step import frame

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def close(got: Tensor, expected: Tensor, share: float = 1e-2) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max()
    assert error <= share * expected.double().abs().max()


def test_convolution() -> None:
    x, weight = normal(1, 2560), normal(4, 2560)
    state, plain = normal(3, 2560), normal(3, 2560)
    close(frame.conv_update(x, state, weight), frame.conv_update(x, plain, weight, plain=True))
    assert torch.equal(state, plain)


def test_gated_norm() -> None:
    x, z, weight = normal(1, 1536), normal(1, 4120)[:, 2560:4096], normal(128)
    close(frame.gated_norm(x, z, weight), frame.gated_norm(x, z, weight, plain=True))


@pytest.mark.parametrize("experts", [16, 512])
def test_router(experts: int) -> None:
    logits = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).view(1, -1)
    logits = (logits.float() / 64).to(DEVICE)
    (ids, weights), (plain_ids, plain_weights) = frame.route(logits, 10), frame.route(logits, 10, plain=True)
    assert torch.equal(ids, plain_ids)
    close(weights, plain_weights, 1e-5)


def test_experts() -> None:
    x, up, down = normal(1, 2560), normal(32, 320, 2560, scale=0.02), normal(32, 2560, 160, scale=0.08)
    ids = torch.tensor([31, 0, 7, 7], dtype=torch.int32, device=DEVICE)
    close(frame.experts(x, ids, up, down), frame.experts(x, ids, up, down, plain=True))


@pytest.mark.parametrize("length", [1, 128, 700, 8192])
def test_attention(length: int) -> None:
    row, q_weight, k_weight = normal(1, 2560), normal(256), normal(256)
    angles = torch.arange(32, device=DEVICE) * 0.19
    caches = [normal(length, 256) for _ in range(4)]
    got = frame.attend(row, q_weight, k_weight, angles, caches[0], caches[1], length - 1)
    plain = frame.attend(row, q_weight, k_weight, angles, caches[2], caches[3], length - 1, plain=True)
    close(got, plain, 2e-2)
    close(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_a_small_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = peers.discover(["profiling.peers.torch_eager"])  # others' kernels take a while to build
    monkeypatch.setattr(peers, "discover", lambda: found)
    path = tmp_path / "step.json"
    few = ["--layers", "4", "--experts", "16", "--context", "300", "--blocks", "2", "--samples", "3"]
    assert decode_step.main([*few, "--json", str(path)]) == 0, capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["launches"]["got"] == {"boundary": 7, "tail": 4, "gdn": 3}
    assert record["target"] is None, "a small step is held to no ratio"
    assert record["ratio"]["count"] == 6
