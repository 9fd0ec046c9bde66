"""Parts of a layer, found by the type of their spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from drivetrain.models.parameters import PartContext
from drivetrain.models.spec import PartSpec

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Factories of one kind of part; ``what`` names it in messages, such as ``mixer``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._factories: dict[type, Callable[[Any, PartContext], Part]] = {}

    def register(self, spec_type: type, factory: Callable[[Any, PartContext], Part]) -> None:
        """Make ``factory(spec, context)`` build parts of that spec type. ValueError when it has a factory already."""
        if spec_type in self._factories:
            raise ValueError(f"{spec_type.__name__} already has a {self._what}: {self._factories[spec_type]!r}")
        self._factories[spec_type] = factory

    def make(self, spec: PartSpec, context: PartContext) -> Part:
        """Build a layer's part. LookupError for a spec type that nobody registered."""
        factory = self._factories.get(type(spec))
        if factory is None:
            known = ", ".join(sorted(kind.__name__ for kind in self._factories))
            raise LookupError(
                f"{context.path}: no {self._what} is registered for {type(spec).__name__}; known: {known}"
            )
        return factory(spec, context)
