"""Tokens to a module: entries with flat bodies, registers and labels made unique over `{ }` scopes."""

from __future__ import annotations

from emulator.errors import UnknownInstructionError
from emulator.ptx.ir import (
    WIDTHS,
    Entry,
    Imm,
    Ins,
    Label,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Sym,
    Vec,
)
from emulator.ptx.lexer import Token, tokens

_SKIPPED = {".pragma", ".weak", ".globl", ".noreturn", ".abi_preserve", ".abi_preserve_control"}
_BOUNDS = {
    ".reqntid",
    ".maxntid",
    ".minnctapersm",
    ".maxnreg",
    ".maxnctapersm",
    ".reqnctapercluster",
    ".explicitcluster",
}
_BOUNDS |= {".maxclusterrank", ".blocksareclusters"}


class _Scope:
    def __init__(self, parent: _Scope | None, tag: str) -> None:
        self.parent, self.tag = parent, tag
        self.registers: dict[str, str] = {}
        self.ranges: list[tuple[str, int, str]] = []  # prefix<n>
        self.labels: set[str] = set()


class Parser:
    """One pass over one text."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens(text)
        self.at = 0
        self.module = Module(text)
        self.scopes = 0

    # ---- tokens
    def peek(self, ahead: int = 0) -> Token:
        at = self.at + ahead
        return (
            self.tokens[at]
            if at < len(self.tokens)
            else Token("end", "", self.tokens[-1].line if self.tokens else 0)
        )

    def next(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, kind: str) -> bool:
        if self.peek().kind == kind:
            self.at += 1
            return True
        return False

    def expect(self, kind: str) -> Token:
        token = self.next()
        if token.kind != kind:
            raise self.error(token, f"expected {kind!r}, got {token.text!r}")
        return token

    def integer(self) -> int:
        negative = self.accept("-")
        value = _integer(self.expect("number").text)
        return -value if negative else value

    @staticmethod
    def error(token: Token, text: str) -> UnknownInstructionError:
        return UnknownInstructionError(f"PTX line {token.line}: {text}")

    # ---- module
    def parse(self) -> Module:
        while self.peek().kind != "end":
            token = self.next()
            if token.text == ".version":
                self.module.version = self.next().text
            elif token.text == ".target":
                self.module.target = self.next().text
                while self.accept(","):
                    self.next()
            elif token.text == ".address_size":
                self.next()
            elif token.text == ".file":
                self.file()
            elif token.text == ".section":
                self.section()
            elif token.text in (".extern", ".visible", ".weak", ".common"):
                continue
            elif token.text == ".shared":
                name, align, size = self.variable()
                self.module.shared[name] = (align, size)
            elif token.text == ".entry":
                self.entry(token)
            elif token.text in _SKIPPED:
                while not self.accept(";"):
                    self.next()
            else:
                raise self.error(token, f"unknown directive {token.text!r}")
        return self.module

    def file(self) -> None:
        index = self.integer()
        self.module.files[index] = self.expect("string").text.strip('"')
        while self.accept(","):
            self.next()

    def section(self) -> None:
        while not self.accept("{"):
            self.next()
        depth = 1
        while depth:
            token = self.next()
            depth += (token.kind == "{") - (token.kind == "}")
            if token.kind == "end":
                raise self.error(token, ".section does not end")

    def variable(self) -> tuple[str, int, int]:
        """After a state space: [.align n] .type name[size];"""
        align = 1
        if self.peek().text == ".align":
            self.next()
            align = self.integer()
        token = self.next()
        width = WIDTHS.get(token.text[1:])
        if width is None:
            raise self.error(token, f"unknown type {token.text!r}")
        name, count = self.expect("name").text, 1
        if self.accept("["):
            count = 0 if self.peek().kind == "]" else self.integer()
            self.expect("]")
        self.expect(";")
        return name, max(align, width // 8), count * width // 8

    def entry(self, token: Token) -> None:
        entry = Entry(self.expect("name").text, token.line, shared=dict(self.module.shared))
        if self.accept("("):
            offset = 0
            while not self.accept(")"):
                if self.next().text != ".param":
                    raise self.error(token, "a kernel parameter does not begin with .param")
                offset = self.param(entry, offset)
                self.accept(",")
        while not self.accept("{"):
            head = self.next()
            if head.text not in _BOUNDS:
                raise self.error(head, f"unknown directive {head.text!r}")
            values = []
            while self.peek().kind == "number":
                values.append(self.integer())
                self.accept(",")
            entry.directives[head.text[1:]] = tuple(values)
        self.body(entry)
        self.module.entries[entry.name] = entry

    def param(self, entry: Entry, offset: int) -> int:
        align, width = 1, None
        while self.peek().text.startswith("."):
            token = self.next()
            if token.text in (".align",):
                align = self.integer()
            elif token.text[1:] in WIDTHS:
                width = WIDTHS[token.text[1:]] // 8
            elif token.text not in (".ptr", ".global", ".shared", ".const", ".generic"):
                raise self.error(token, f"unknown in a parameter: {token.text!r}")
        name = self.expect("name")
        if width is None:
            raise self.error(name, "a parameter without a type")
        size = width
        if self.accept("["):
            size *= self.integer()
            self.expect("]")
        align = max(align, width)
        offset = -(-offset // align) * align
        entry.params.append(Param(name.text, align, size, offset))
        return offset + size

    # ---- bodies
    def body(self, entry: Entry) -> None:
        scope = _Scope(None, "")
        self.find_labels(scope)
        source: tuple[int, int] | None = None
        open_scopes = [scope]
        while open_scopes:
            token, scope = self.next(), open_scopes[-1]
            if token.kind == "{":
                self.scopes += 1
                inner = _Scope(scope, f"@{self.scopes}")
                self.find_labels(inner)
                open_scopes.append(inner)
            elif token.kind == "}":
                open_scopes.pop()
            elif token.kind == ";":
                continue
            elif token.kind == "end":
                raise self.error(token, f"entry {entry.name} does not end")
            elif token.text == ".reg":
                self.registers(entry, scope)
            elif token.text == ".loc":
                source = (self.integer(), self.integer())
                self.integer()
                while self.accept(","):  # function_name label [+ n], inlined_at file line column
                    while (
                        self.peek().kind in ("number", "+")
                        or (
                            self.peek().kind == "name" and self.peek().text in ("function_name", "inlined_at")
                        )
                        or (self.peek().kind == "name" and self.peek(-1).text == "function_name")
                    ):
                        self.next()
            elif token.text == ".shared":
                name, align, size = self.variable()
                entry.shared[name + scope.tag] = (align, size)
            elif token.text in _SKIPPED:
                while not self.accept(";"):
                    self.next()
            elif token.kind == "name" and self.peek().kind == ":":
                self.next()
                entry.body.append(Label(token.text + scope.tag))
            elif token.kind == "@" or token.kind == "name":
                entry.body.append(self.instruction(entry, token, scope, source))
            else:
                raise self.error(token, f"unexpected {token.text!r}")

    def find_labels(self, scope: _Scope) -> None:
        """Labels of the scope that begins here, known before branches to them are read."""
        depth, at = 0, self.at
        while at < len(self.tokens):
            kind = self.tokens[at].kind
            if kind == "{":
                depth += 1
            elif kind == "}":
                if depth == 0:
                    return
                depth -= 1
            elif (
                depth == 0
                and kind == "name"
                and at + 1 < len(self.tokens)
                and self.tokens[at + 1].kind == ":"
                and self.tokens[at - 1].kind in ("{", "}", ";", ":", "number", "string", "name")
            ):
                scope.labels.add(self.tokens[at].text)
            at += 1

    def registers(self, entry: Entry, scope: _Scope) -> None:
        token = self.next()
        lanes = 1
        if token.text in (".v2", ".v4"):
            lanes, token = int(token.text[2:]), self.next()
        kind = token.text[1:]
        if kind not in WIDTHS:
            raise self.error(token, f"unknown register type {token.text!r}")
        while True:
            name = self.expect("name").text
            if self.accept("<"):
                count = self.integer()
                self.expect(">")
                scope.ranges.append((name, count, kind))
            elif lanes > 1:
                for part in "xyzw"[:lanes]:
                    scope.registers[f"{name}.{part}"] = kind
                scope.registers[name] = f"v{lanes}.{kind}"
            else:
                scope.registers[name] = kind
            if not self.accept(","):
                break
        self.expect(";")

    def resolve(self, entry: Entry, scope: _Scope | None, name: str) -> tuple[str, str] | None:
        """(unique name, type) of a register that is visible in a scope."""
        while scope is not None:
            kind = scope.registers.get(name)
            if kind is None:
                for prefix, count, of in scope.ranges:
                    digits = name[len(prefix) :]
                    if name.startswith(prefix) and digits.isdigit() and int(digits) < count:
                        kind = of
            if kind is not None:
                unique = name + scope.tag
                if not kind.startswith("v"):
                    entry.registers[unique] = kind
                return unique, kind
            scope = scope.parent
        return None

    def instruction(self, entry: Entry, token: Token, scope: _Scope, source: tuple[int, int] | None) -> Ins:
        guard = None
        if token.kind == "@":
            negated = self.accept("!")
            name = self.expect("name")
            found = self.resolve(entry, scope, name.text)
            if found is None:
                raise self.error(name, f"unknown predicate {name.text!r}")
            guard = (Reg(found[0]), negated)
            token = self.expect("name")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand(entry, scope))
            if not self.accept(","):
                self.expect(";")
                break
        return Ins(token.text, operands, token.line, guard, source)

    def operand(self, entry: Entry, scope: _Scope) -> Operand:
        first = self.simple(entry, scope)
        if self.accept("|"):
            return Pair(first, self.simple(entry, scope))
        return first

    def simple(self, entry: Entry, scope: _Scope) -> Operand:
        token = self.next()
        if token.kind == "!":
            return Not(self.simple(entry, scope))
        if token.kind == "-":
            value = self.simple(entry, scope)
            if not isinstance(value, Imm):
                raise self.error(token, "a minus sign before something that is no number")
            return Imm(-value.value, "-" + value.text)
        if token.kind == "number":
            text = token.text
            if text[:2] in ("0f", "0F", "0d", "0D"):
                return Imm(int(text[2:], 16), text, real=True)
            return Imm(_integer(text), text)
        if token.kind == "{":
            items = []
            while not self.accept("}"):
                items.append(self.operand(entry, scope))
                self.accept(",")
            return Vec(tuple(items))
        if token.kind == "[":
            return self.memory(entry, scope)
        if token.kind == "name":
            return self.named(entry, scope, token)
        raise self.error(token, f"unexpected {token.text!r} in an operand")

    def named(self, entry: Entry, scope: _Scope, token: Token) -> Operand:
        name = token.text
        if name == "_":
            return Sink()
        found = self.resolve(entry, scope, name)
        if found is not None:
            unique, kind = found
            if kind.startswith("v"):
                parts = [self.resolve(entry, scope, f"{name}.{p}") for p in "xyzw"[: int(kind[1])]]
                return Vec(tuple(Reg(p[0]) for p in parts if p))
            return Reg(unique)
        if name.startswith("%"):
            return Special(name)
        at: _Scope | None = scope
        while at is not None:
            if name in at.labels:
                return Sym(name + at.tag)
            at = at.parent
        return Sym(name)

    def memory(self, entry: Entry, scope: _Scope) -> Mem:
        base, offset = self.simple(entry, scope), 0
        while self.peek().kind in ("+", "-"):
            negative = self.next().kind == "-"
            value = self.integer()
            offset += -value if negative else value
        coords = None
        if self.accept(","):
            inner = self.simple(entry, scope)
            coords = inner.items if isinstance(inner, Vec) else (inner,)
        self.expect("]")
        return Mem(base, offset, coords)


def _integer(text: str) -> int:
    return int(text.rstrip("U"), 0)


def parse(text: str) -> Module:
    """The module of a PTX text. Raises UnknownInstructionError, naming the line, at what it does not know."""
    return Parser(text).parse()
