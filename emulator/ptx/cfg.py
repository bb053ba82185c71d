"""A body to basic blocks, in an order in which lanes that parted meet again.

Blocks end at branches and begin at labels and at instructions where a warp may have to wait or others may
interfere: a warp that cannot go on is resumed at the head of a block. Blocks are numbered so that loops
are contiguous and everything else comes after what leads to it; a warp runs its lanes at the lowest block
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from emulator.errors import UnknownInstructionError
from emulator.ptx.ir import Entry, Ins, Label, Sym

ENDS = ("bra", "ret", "exit", "trap")


@dataclass
class Block:
    """Instructions without control flow, then `end` (a bra, ret, exit or trap) or a fall through to
    `next`."""

    body: list[Ins] = field(default_factory=list)
    end: Ins | None = None
    target: int | None = None
    next: int | None = None
    stop: bool = False  # begins with an instruction that may block, or that others see

    @property
    def successors(self) -> list[int]:
        return [s for s in (self.target, self.next) if s is not None]


def blocks_of(entry: Entry, stops: Callable[[Ins], bool]) -> list[Block]:
    """The blocks of an entry, in order; the first is where it begins. Raises UnknownInstructionError for a
    label that is not there."""
    blocks = [Block()]
    labels: dict[str, int] = {}
    for item in entry.body:
        last = blocks[-1]
        if isinstance(item, Label):
            if last.body or last.end or last.stop:
                blocks.append(Block())
            labels[item.name] = len(blocks) - 1
            continue
        if last.end is not None:
            blocks.append(last := Block())
        if item.parts[0] in ENDS:
            last.end = item
            continue
        if stops(item):
            if last.body or last.stop or len(blocks) == 1:
                blocks.append(last := Block())
            last.stop = True
        last.body.append(item)
    for i, block in enumerate(blocks):
        end = block.end
        if end is None or end.guard is not None or end.parts[0] == "trap":
            block.next = i + 1 if i + 1 < len(blocks) else None
        if end is not None and end.parts[0] == "bra":
            target = end.operands[0]
            if not isinstance(target, Sym) or target.name not in labels:
                raise UnknownInstructionError(f"PTX line {end.line}: branch to an unknown label")
            block.target = labels[target.name]
    return _reorder(blocks)


def _reorder(blocks: list[Block]) -> list[Block]:
    order = _weak_topological(list(range(len(blocks))), blocks, 0)
    place = {b: i for i, b in enumerate(order)}
    out = [blocks[b] for b in order]
    for block in out:
        block.target = place[block.target] if block.target is not None else None
        block.next = place[block.next] if block.next is not None else None
    return out


def _weak_topological(nodes: list[int], blocks: list[Block], head: int) -> list[int]:
    """Components in topological order; within a component its head first, then the rest without the edges
    back to it."""
    order: list[int] = []
    for component in _components(nodes, blocks, head):
        if len(component) == 1:
            order += component
            continue
        first = component[0]
        rest = component[1:]
        order.append(first)
        seen: set[int] = set()
        inside = set(rest)
        for start in [s for s in blocks[first].successors if s in inside] + rest:
            if start not in seen:
                reach = _reachable(start, inside - seen, blocks)
                part = _weak_topological(sorted(reach), blocks, start)
                seen |= reach
                # what is reached later may lead into what was reached before: those come first
                order[len(order) - 0 :] = part
    return order


def _reachable(start: int, inside: set[int], blocks: list[Block]) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for s in blocks[stack.pop()].successors:
            if s in inside and s not in seen:
                seen.add(s)
                stack.append(s)
    return seen


def _components(nodes: list[int], blocks: list[Block], head: int) -> list[list[int]]:
    """Strongly connected components of what `head` reaches inside `nodes`, topologically sorted; first of
    each: where it is entered."""
    inside = set(nodes)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    out: list[list[int]] = []
    work: list[tuple[int, int]] = [(head, 0)]
    while work:
        node, child = work.pop()
        if child == 0:
            index[node] = low[node] = len(index)
            stack.append(node)
            on.add(node)
        successors = [s for s in blocks[node].successors if s in inside]
        while child < len(successors):
            s = successors[child]
            child += 1
            if s not in index:
                work += [(node, child), (s, 0)]
                break
            if s in on:
                low[node] = min(low[node], index[s])
        else:
            if low[node] == index[node]:
                component = []
                while True:
                    top = stack.pop()
                    on.discard(top)
                    component.append(top)
                    if top == node:
                        break
                component.reverse()  # the entered one first
                out.append(component)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
    out.reverse()
    return out
