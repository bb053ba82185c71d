"""PTX text to tokens that know their line."""

from __future__ import annotations

import re
from typing import NamedTuple

from emulator.errors import UnknownInstructionError


class Token(NamedTuple):
    kind: str  # name, number, string, or the punctuation itself
    text: str
    line: int


_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+ | //[^\n]* | /\*.*?\*/)
  | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U? | 0[bB][01]+U?
               | \d+\.\d+ | \d+U?\b)
  | (?P<name>[%$_A-Za-z.][\w$%]*(?:\.[\w$%]+|::[\w$%]+)*)
  | (?P<string>"[^"]*")
  | (?P<punct>[{}\[\](),;:@!+\-|=<>*~/])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens(text: str) -> list[Token]:
    """All tokens of a PTX text. Raises UnknownInstructionError at a character that begins none."""
    out: list[Token] = []
    at, line, end = 0, 1, len(text)
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnknownInstructionError(f"PTX line {line}: cannot read {text[at : at + 20]!r}")
        kind, piece = match.lastgroup, match.group()
        if kind == "space":
            line += piece.count("\n")
        else:
            out.append(Token(piece if kind == "punct" else str(kind), piece, line))
        at = match.end()
    return out
