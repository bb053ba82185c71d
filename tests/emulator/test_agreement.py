"""The emulator against bits that an H200 produced (h200.npz): equal, or within what agreement.py derives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.emulator import agreement


@pytest.fixture(scope="module")
def record() -> Mapping[str, Any]:
    return dict(np.load(agreement.RECORD))


@pytest.mark.parametrize(("op", "name"), agreement.cases())
def test_the_emulator_agrees_with_the_gpu(op: str, name: str, record: Mapping[str, Any]) -> None:
    """And the kernel has the approximate and matrix instructions that the rule names, no others."""
    texts: list[str] = []

    def listen(ptx: str) -> str:
        texts.append(ptx)
        return ptx

    for difference in agreement.compare(op, name, record, listen):
        assert difference.ok, (
            f"{difference}; a kernel that now computes otherwise needs a new record: docs/emulator.md"
        )
    used = set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)", "\n".join(texts), re.MULTILINE))
    approximate = {i.split(".")[0] for i in used if {"approx", "full"} & set(i.split("."))}
    assert approximate == agreement.RULES[op].approximate
    assert any(re.match(r"w?g?mma\.", i) for i in used) == agreement.RULES[op].matrix


@pytest.mark.parametrize("op", ["hc_gate", "hc_apply", "gdn_packed_decode", "hc_mix"])
def test_another_result_is_noticed(op: str, record: Mapping[str, Any]) -> None:
    """One element of the record, two units in the last place of its 16 bits or 2^8 of its 32 away."""
    name = "T3-bf16-small"
    last = [key for key in record if key.startswith(f"{op}|{name}|")][-2]
    values = record[last].copy()
    at = int(np.abs(values.view(np.uint16 if values.itemsize == 2 else np.uint32) & 0x7FFF).argmax())
    values.flat[at] += 2 if values.itemsize == 2 else 1 << 8
    found = agreement.compare(op, name, {**record, last: values})
    assert not all(difference.ok for difference in found)


def test_other_inputs_are_refused(record: Mapping[str, Any]) -> None:
    other = {**record, "hc_gate|T3-bf16-small|inputs": np.zeros(32, np.uint8)}
    with pytest.raises(ValueError, match="the inputs are not those of the record"):
        agreement.compare("hc_gate", "T3-bf16-small", other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such.npz"], "no-such.npz: no record"),
        ([__file__], "no record"),
        (["--help"], "no record"),
        (["record"], "record FILE"),
        (["record", "x.npz", "hc_gat"], "record FILE"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(arguments) == 2
    assert said in capsys.readouterr().err
