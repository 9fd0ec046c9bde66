"""Whether two accesses to shared memory can ever meet, by a kernel's machine code.

A barrier that names no number of threads holds the whole block. So each warp passes it as often as every other, and an
access that warps make only after having passed it n times lies, for the whole block, between its n-th and its next
time. This follows all ways through the code, counts how often such a barrier may have been passed at each instruction,
and calls two instructions ordered when they have no count in common. Ordinary loads and stores only: copies and matrix
units see shared memory in another way.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);(.*)")
TARGET = re.compile(r"`\(([^)]+)\)")
READS, WRITES = {"LDS", "LDSM"}, {"STS", "STSM"}
ENDS = {"EXIT", "RET", "KILL", "RTT"}
JUMPS = {"BRA", "JMP"}
TABLES = {"BRX", "JMX", "BRXU", "JMXU"}
CALLS = {"CALL", "JCAL"}


class Unclear(Exception):
    """The code does something that is not followed here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: where it is, its predicate or "", its name without and with modifiers, the rest."""

    at: int
    guard: str
    name: str
    whole: str
    operands: str
    targets: tuple[str, ...]

    @property
    def barrier(self) -> str:
        """The number of the barrier that it holds the whole block at, or ""."""
        plain = self.whole in ("BAR.SYNC", "BAR.SYNC.DEFER_BLOCKING")
        return self.operands if plain and re.fullmatch(r"0x[0-9a-f]+", self.operands) else ""


Known = frozenset[tuple[str, bool | str]]  # what predicates are, and where warps that parted meet again
Node = tuple[int, Known]  # the number of an instruction, and what is known there


@dataclass
class Code:
    """One kernel. ``labels``: the number of the instruction behind each."""

    instructions: list[Instruction]
    labels: dict[str, int]
    held: dict[str, tuple[dict[int, set[int]], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Code:
        """Read what nvdisasm says of one kernel."""
        code = cls([], {})
        for line in text.splitlines():
            stripped = line.strip()
            if label := LABEL.match(stripped):
                code.labels[label.group(1)] = len(code.instructions)
            elif found := LINE.match(stripped):
                at, guard, name, modifiers, operands, rest = found.groups()
                targets = tuple(TARGET.findall(operands))
                if name in TABLES:
                    listed = re.search(r'BRANCH_TARGETS ([^"]+)"', operands + rest)
                    targets = tuple(listed.group(1).strip().split(",")) if listed else ()
                one = Instruction(int(at, 16), guard or "", name, name + modifiers, operands.strip(), targets)
                code.instructions.append(one)
        if not code.instructions:
            raise Unclear("no instructions")
        return code

    @cached_property
    def places(self) -> dict[int, int]:
        """Numbers of instructions by where they are."""
        return {one.at: number for number, one in enumerate(self.instructions)}

    def number(self, label: str) -> int:
        """The instruction behind a label."""
        if label not in self.labels:
            raise Unclear(f"no label {label}")
        return self.labels[label]

    def barriers(self) -> list[str]:
        """Barriers that hold the whole block wherever they are used."""
        every: dict[str, bool] = {}
        for one in self.instructions:
            if one.name == "BAR":
                number = one.operands.split(",")[0].strip()
                if not number.startswith("0x"):
                    raise Unclear(f"a barrier whose number is not in the code: {one.whole} {one.operands}")
                every[number] = every.get(number, True) and one.barrier == number
        return [number for number, whole in every.items() if whole]

    def after(self, number: int, known: Known) -> Iterator[tuple[Node, bool]]:
        """Where a warp may be after an instruction, and whether the instruction was carried out."""
        one = self.instructions[number]
        known = frozenset(pair for pair in known if pair[0][0] == "B" or not changes(one, pair[0]))
        name, wanted = one.guard.lstrip("!"), not one.guard.startswith("!")
        if name in ("", "PT", "UPT"):
            if wanted:
                yield from ((node, True) for node in self.carried(one, number, known))
            else:
                yield (number + 1, known), False
            return
        decides = one.name in ENDS | JUMPS | TABLES | CALLS or one.name in ("BAR", "BSYNC")
        for value in (True, False):
            if (name, not value) in known or not (decides or value == wanted):
                continue
            learned = known | {(name, value)} if one.name == "BAR" else known
            if value == wanted:
                yield from ((node, True) for node in self.carried(one, number, learned))
            else:
                yield (number + 1, learned), False

    def carried(self, one: Instruction, number: int, known: Known) -> Iterator[Node]:
        """Where a warp goes from an instruction that it carries out."""
        if one.name in ENDS:
            return
        if one.name in CALLS:
            self.check_call(one)
        labels, place = one.targets, one.operands.split(",")[0].strip()
        if one.name in ("BSSY", "BMOV"):
            known = frozenset(pair for pair in known if pair[0] != place)
            known, labels = known | {(place, label) for label in labels}, ()
        elif one.name == "BSYNC":
            labels = tuple(str(value) for name, value in known if name == place)
        if one.name in TABLES | JUMPS | {"BSYNC"} and not labels:
            raise Unclear(f"where does {one.whole} {one.operands} go?")
        for label in labels:
            yield self.number(label), known
        whole = one.name in JUMPS and re.fullmatch(r"`\([^)]+\)", one.operands) is not None
        if not (whole or one.name in TABLES or one.name == "BSYNC"):
            yield number + 1, known

    def check_call(self, one: Instruction) -> None:
        """What is called must not wait for others."""
        if not one.targets:
            raise Unclear(f"what does {one.whole} {one.operands} call?")
        number = self.number(one.targets[0])
        while self.instructions[number].name != "RET":
            if self.instructions[number].name == "BAR":
                raise Unclear("a barrier in a function")
            number += 1
            if number == len(self.instructions):
                raise Unclear("a function without an end")

    def counts(self, barrier: str) -> tuple[dict[int, set[int]], int]:
        """How often a barrier may have been passed before each instruction, and the largest count of those that no
        loop through the barrier leads to. Larger counts than are followed belong to loops only."""
        if barrier not in self.held:
            self.held[barrier] = self.followed(barrier)
        return self.held[barrier]

    def followed(self, barrier: str) -> tuple[dict[int, set[int]], int]:
        """As ``counts``, by going all ways."""
        steps: dict[Node, list[tuple[Node, int]]] = {}
        waiting: deque[Node] = deque([(0, frozenset())])
        while waiting:
            node = waiting.popleft()
            if node in steps:
                continue
            if node[0] >= len(self.instructions):
                raise Unclear("the code has no end")
            holds = self.instructions[node[0]].barrier == barrier
            steps[node] = [(then, int(holds and done)) for then, done in self.after(*node)]
            waiting.extend(then for then, _ in steps[node])
        once = sum(self.instructions[number].barrier == barrier for number, _ in steps)
        found: dict[int, set[int]] = defaultdict(set)
        seen: set[tuple[Node, int]] = set()
        ways: deque[tuple[Node, int]] = deque([((0, frozenset()), 0)])
        while ways:
            way = ways.popleft()
            if way in seen:
                continue
            seen.add(way)
            node, count = way
            found[node[0]].add(count)
            ways.extend((then, count + more) for then, more in steps[node] if count + more <= 4 * once + 4)
        return found, once


def changes(one: Instruction, name: str) -> bool:
    """Whether a predicate may be another one after an instruction."""
    return one.name in CALLS or re.search(rf"\b({name}|U?PR)\b", one.operands) is not None


def shown(counts: set[int], loop: bool) -> str:
    """Counts in words."""
    some = [str(count) for count in sorted(counts)]
    return ", ".join(some[:3]) + " ..." if loop else ", ".join(some)


def ordered(code: Code, one: int, other: int) -> str:
    """Why instructions at ``one`` and ``other`` never meet between two barriers; "" if they may. Unclear: not known."""
    numbers = [code.places.get(at, -1) for at in (one, other)]
    for number in numbers:
        if number < 0 or code.instructions[number].name not in READS | WRITES:
            return ""
    for barrier in code.barriers():
        counts, once = code.counts(barrier)
        first, second = (counts[number] for number in numbers)
        loops = [max(each, default=0) > once for each in (first, second)]
        if first and second and not first & second and not all(loops):
            one_name, other_name = (code.instructions[number].name for number in numbers)
            sides = f"{one_name} after {shown(first, loops[0])}; {other_name} after {shown(second, loops[1])} times"
            return f"barrier {int(barrier, 16)} of the whole block is passed between them ({sides})"
    return ""


def fits(code: Code, at: int, kind: str) -> bool:
    """Whether the instruction at a place is an ordinary access of that kind, ``Read`` or ``Write``."""
    number = code.places.get(at, -1)
    return number >= 0 and code.instructions[number].name in {"Read": READS, "Write": WRITES}.get(kind, set())


def disassembled(cubin: bytes, tool: Path) -> str:
    """What nvdisasm says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
