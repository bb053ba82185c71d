"""What the command lines print: progress on a terminal and elsewhere."""

from __future__ import annotations

import pytest

from profiling import console


def test_dots_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with console.phase("cold", 3) as tick:
        for _ in range(3):
            tick()
    assert capsys.readouterr().out.startswith("  cold ... 0.")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with console.phase("cold", 4) as tick:
        tick()
        tick()
    drawn = capsys.readouterr().out.split("\r")
    assert [line.count("#") for line in drawn[1:]] == [0, 6, 12]
    assert drawn[2] == "  cold [######..................] 1/4"
    assert drawn[3].startswith("  cold [############............] 2/4 0.")


def test_dots_where_the_end_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with console.phase("capture") as tick:
        tick()
    assert capsys.readouterr().out.startswith("  capture . 0.")
