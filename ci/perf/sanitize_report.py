"""What compute-sanitizer printed: how much it found, and which of the races that it reports cannot be.

Racecheck reports races between warps that Triton's ``warp_specialize`` starts and the warps that hand them their work:
numbers of partitions and captured values in shared memory, behind a barrier of the whole block. Each report is held
against the machine code of the kernel that ran (``sanitize_order``); it is put aside only where a barrier is proved to
lie between the two accesses, and is listed with the proof.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sanitize_order import Code, Unclear, disassembled, fits, ordered

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
ACCESS = re.compile(r"(\w+) access at (?:0x[0-9a-f]+ in )?(\S.*?)\+0x([0-9a-f]+)\b")
FIRST, NEXT = "Race reported between", "and "


@dataclass(frozen=True, slots=True)
class Access:
    """``kind``: Read or Write; where in the machine code of ``kernel``."""

    kind: str
    kernel: str
    at: int


@dataclass(slots=True)
class Race:
    """One report: an access and those that it may meet. ``proof``: why it can't, for each; "" while there is none."""

    first: Access
    others: list[Access] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    proof: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Access]:
        """Every access of the report."""
        return [self.first, *self.others]

    @property
    def cleared(self) -> bool:
        """Whether no pair of the report can meet."""
        return bool(self.others) and len(self.proof) == len(self.others) and all(self.proof)


def races_in(text: str) -> list[Race]:
    """The races of racecheck's output. A line of one that is not understood leaves it without a proof."""
    races: list[Race] = []
    inside = False
    for line in text.splitlines():
        found = ACCESS.search(line)
        if FIRST in line:
            first = Access(found[1], found[2], int(found[3], 16)) if found else Access("", "", -1)
            races.append(Race(first, text=[line.strip("= ")]))
            inside = True
        elif inside and line.startswith("=========") and line.strip("= ").startswith(NEXT):
            other = Access(found[1], found[2], int(found[3], 16)) if found else Access("", "", -1)
            races[-1].others.append(other)
            races[-1].text.append(line.strip("= "))
        else:
            inside = False
    return races


@dataclass
class Kernels:
    """The machine code of kernels that ran: ``folder`` holds files NAME.NUMBER.cubin, ``tool`` is nvdisasm."""

    folder: Path
    tool: Path
    codes: dict[str, list[Code | None]] = field(default_factory=dict)

    def of(self, name: str) -> Sequence[Code | None]:
        """All variants of a kernel; None for one that can't be read."""
        if name not in self.codes:
            files = sorted(self.folder.glob(f"{name}.*.cubin"))
            self.codes[name] = [self.read(file) for file in files]
        return self.codes[name]

    def read(self, file: Path) -> Code | None:
        """One variant."""
        try:
            return Code.of(disassembled(file.read_bytes(), self.tool))
        except (Unclear, OSError, ValueError, ArithmeticError, RuntimeError) as error:
            print(f"{file.name}: {type(error).__name__}: {error}")
            return None


def proof_of(one: Access, other: Access, kernels: Kernels) -> str:
    """Why two accesses never meet: in each variant that has such accesses there, and there is one. "" if they may."""
    if one.kernel != other.kernel or {one.kind, other.kind} - {"Read", "Write"}:
        return ""
    proofs = []
    for code in kernels.of(one.kernel):
        if code is None:
            return ""
        if fits(code, one.at, one.kind) and fits(code, other.at, other.kind):
            try:
                proofs.append(ordered(code, one.at, other.at))
            except Unclear as why:
                print(f"{one.kernel}: {why}")
                return ""
    return proofs[0] if proofs and all(proofs) else ""


def judged(text: str, kernels: Kernels, racing: str = "", ours: Collection[str] = ()) -> dict[str, Any]:
    """What a tool said: ``errors`` by its own summary (None: it did not end), races ``cleared`` with their proofs, how
    many reports of the kernel ``racing``, which has one, were ``expected``, those of kernels that are not ``ours`` (if
    it is known which are), and how many are ``left`` after all three."""
    summary = SUMMARY.findall(text)
    races = races_in(text)
    for race in races:
        race.proof = [proof_of(race.first, other, kernels) for other in race.others]
    cleared = [race for race in races if race.cleared]
    expected = [race for race in races if not race.cleared and racing and race.first.kernel == racing]
    foreign = [race.text for race in races if ours and all(one.kernel and one.kernel not in ours for one in race.all)]
    errors = int(summary[-1]) if summary else None
    if errors is not None and errors < len(races):  # it prints more than it counts: nothing is put aside
        return {"errors": errors, "left": len(races), "cleared": [], "expected": 0, "foreign": []}
    left = None if errors is None else errors - len(cleared) - len(expected) - len(foreign)
    said = [{"report": race.text, "never_meet": race.proof} for race in cleared]
    return {"errors": errors, "left": left, "cleared": said, "expected": len(expected), "foreign": foreign}
