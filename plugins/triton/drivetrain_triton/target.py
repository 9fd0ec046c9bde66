"""What a kernel's launch code must know of the device that it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``kind``: Triton's name of the backend, or ``interpreter``; ``arch``: its number for the chip (90, 100, 942 ...).

    ``multiprocessors``: how many programs run side by side at least. ``shared_bytes``: what one program may have.
    ``overlaps``: the device may begin a kernel before the one ahead of it has ended (programmatic dependent launch);
    kernels then wait by themselves before they touch what others write.
    """

    kind: str
    arch: int
    multiprocessors: int
    shared_bytes: int
    overlaps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Launch options beyond a kernel's own."""
        return {"launch_pdl": True} if self.overlaps else {}


INTERPRETER = Target(kind="interpreter", arch=0, multiprocessors=8, shared_bytes=1 << 30)
