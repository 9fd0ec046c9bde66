"""Which implementation serves which op, as ``engine explain`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drivetrain_api.v1 import OpSpec, OpTraits, Provided

Provider = Literal["native", "shared", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """The implementation bound for one spec. ``count``: how many places of the model bound it.

    ``reason``: why the reference serves it; empty for a provider's own.
    """

    op: str
    spec: OpSpec
    provider: Provider
    label: str
    reason: str
    traits: OpTraits
    count: int


def provider_of(provided: Provided) -> Provider:
    """Return ``shared`` for an implementation whose label says so (``shared: name``), else ``native``."""
    return "shared" if provided.label.startswith("shared") else "native"
