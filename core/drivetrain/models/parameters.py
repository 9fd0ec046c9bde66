"""Device tensors that a decoder holds, empty until ``build.load`` fills them.

A holder names its ``sources``: for each device tensor that it takes, the paths of the checkpoint tensors which are
joined along dimension 0 to make it. Loading goes holder by holder, so that a packed weight's source is freed before
the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from drivetrain.models.spec import ModelSpec, Shape
from drivetrain.ops import Ops
from drivetrain.ops.provided import pack, packed_bytes
from drivetrain_api.v1 import DeviceRuntime, Linear, LinearSpec, OpSpec, Packed, dtype_bytes, torch_dtype
from drivetrain_api.v1.linear import LinearRole

Sources = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Device bytes that a holder keeps, and the most that it held at once beside the tensors it was given."""

    nbytes: int
    peak_bytes: int


class Holder(Protocol):
    """Something that is filled at load."""

    @property
    def sources(self) -> Sources:
        """Paths joined to each device tensor that ``install`` takes."""

    def planned_bytes(self) -> int:
        """What ``install`` will report as ``nbytes``; exact."""

    def install(self, tensors: Sequence[torch.Tensor], runtime: DeviceRuntime) -> Installed:
        """Take the device tensors, one for each of ``sources``."""


class Weight:
    """One plain tensor: a norm's weight, an embedding. ``value``, of dtype ``dtype``, exists after loading."""

    __slots__ = ("_bytes", "_dtype", "sources", "value")
    value: torch.Tensor

    def __init__(self, path: str, shape: Shape, dtype: str) -> None:
        self.sources: Sources = ((path,),)
        self._bytes = prod(shape) * dtype_bytes(dtype)
        self._dtype = torch_dtype(dtype)

    def planned_bytes(self) -> int:
        return self._bytes

    def install(self, tensors: Sequence[torch.Tensor], runtime: DeviceRuntime) -> Installed:
        self.value = tensors[0].to(self._dtype)
        converted = 0 if self.value is tensors[0] else self._bytes
        return Installed(nbytes=self.value.numel() * self.value.element_size(), peak_bytes=converted)


class HeadWeights:
    """Weights that heads of a kind share, one row a head: ``value`` [heads, size] of dtype ``dtype``."""

    __slots__ = ("_counts", "_dtype", "_size", "sources", "value")
    value: torch.Tensor

    def __init__(self, path: str, heads: Mapping[str, int], size: int, dtype: str) -> None:
        """``heads``: parameter name below ``path`` -> how many heads share it."""
        self.sources: Sources = tuple((f"{path}.{name}",) for name in heads)
        self._counts, self._size, self._dtype = tuple(heads.values()), size, dtype

    def planned_bytes(self) -> int:
        return sum(self._counts) * self._size * dtype_bytes(self._dtype)

    def install(self, tensors: Sequence[torch.Tensor], runtime: DeviceRuntime) -> Installed:
        rows = [t.unsqueeze(0).expand(count, -1) for t, count in zip(tensors, self._counts, strict=True)]
        self.value = torch.cat(rows).to(torch_dtype(self._dtype))
        return Installed(nbytes=self.planned_bytes(), peak_bytes=2 * self.planned_bytes())


class Constant:
    """A tensor computed from the spec, moved to the device at load."""

    __slots__ = ("_host", "sources", "value")
    value: torch.Tensor

    def __init__(self, host: torch.Tensor) -> None:
        self.sources: Sources = ()
        self._host = host

    def planned_bytes(self) -> int:
        return self._host.numel() * self._host.element_size()

    def install(self, tensors: Sequence[torch.Tensor], runtime: DeviceRuntime) -> Installed:
        self.value = runtime.from_host(self._host)
        return Installed(nbytes=self.planned_bytes(), peak_bytes=0)


class Projection:
    """A linear layer, its weight packed by the provider. ``tied``: it packs another holder's tensor instead."""

    __slots__ = ("_apply", "_linear", "_tied", "packed", "sources", "spec")
    packed: Packed

    def __init__(self, spec: LinearSpec, linear: Linear, sources: Sources, tied: Weight | None = None) -> None:
        self.spec = spec
        self.sources = sources
        self._linear = linear
        self._apply = linear.apply
        self._tied = tied

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return self._apply(x, self.packed)

    def planned_bytes(self) -> int:
        return packed_bytes(self._linear, self.spec)

    def install(self, tensors: Sequence[torch.Tensor], runtime: DeviceRuntime) -> Installed:
        if self._tied is not None:
            weight, bias = self._tied.value, None
        else:
            weight, bias = tensors[0], tensors[1] if self.spec.bias else None
        self.packed = pack(self._linear, self.spec, weight, bias)
        return Installed(nbytes=self.packed.nbytes, peak_bytes=self.packed.peak_bytes)


class NormedProjection:
    """The addition and the norm before a part, and the part's first linear, in one op."""

    __slots__ = ("_apply", "_projection", "_weight")

    def __init__(self, linear: Any, projection: Projection, weight: Weight) -> None:
        self._apply, self._projection, self._weight = linear.apply, projection, weight

    def __call__(self, branch: torch.Tensor, stream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (product [T, out], sum [T, hidden]) of branch and stream [T, hidden]; see ``norms.Join``."""
        entered: tuple[torch.Tensor, torch.Tensor]
        entered = self._apply(branch, stream, self._weight.value, self._projection.packed)
        return entered


class GreedyHead:
    """The head and the draw of greedy rows in one op, so that their logits need not lie in memory."""

    __slots__ = ("_best", "_head", "takes")

    def __init__(self, run: Any, head: Projection) -> None:
        """``takes(rows)``: whether so many rows are done so."""
        self._best, self._head = run.best, head
        self.takes: Callable[[int], bool] = run.takes

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, hidden] -> (tokens [N] int32, their logits [N] float32)."""
        best: tuple[torch.Tensor, torch.Tensor] = self._best(hidden, self._head.packed)
        return best


class PartContext:
    """What a mixer or a feed-forward needs to be built: ops, the model, its place, and its parameters' shapes.

    Every holder made here is kept in ``holders`` and so gets loaded. ``path`` is the part's place in the model, such
    as ``layers.3.mixer``. ``enter``: what does the norm before the part, where it is more than the norm.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        path: str,
        shapes: Mapping[str, Shape],
        norm: tuple[OpSpec, Weight] | None = None,
    ) -> None:
        """``norm``: the addition and norm that give the part its input."""
        self._norm = norm
        self.enter: NormedProjection | None = None
        self.spec = spec
        self.ops = ops
        self.path = path
        self.shapes = shapes
        self.holders: list[Holder] = []

    def weight(self, name: str) -> Weight:
        """Hold the part's parameter of that name as a plain tensor of the activations' dtype."""
        weight = Weight(f"{self.path}.{name}", self.shapes[name], self.spec.activation_dtype)
        self.holders.append(weight)
        return weight

    def projection(self, names: Sequence[str], role: LinearRole, then: OpSpec | None = None) -> tuple[Projection, bool]:
        """Hold the linears of those names as one, outputs joined in that order. All have a bias, or none has.

        ``then``: the op that follows at once; the second value says whether the projection does it too.
        """
        spec, sources = self._joined(names, role)
        fused = None if then is None else self.ops.fuse(spec, then)
        return self._hold(spec, sources, self.ops.bind(spec) if fused is None else fused), fused is not None

    def first_projection(
        self, names: Sequence[str], role: LinearRole, then: OpSpec | None = None
    ) -> tuple[Projection | None, bool]:
        """As ``projection``, for a part that does nothing else with its input.

        None: the norm before the part does the linear and ``then`` too, and ``forward`` is given their result.
        """
        if self._norm is not None:
            normed, weight = self._norm
            spec, sources = self._joined(names, role)
            fused = self.ops.fuse(normed, spec, *(() if then is None else (then,)))
            if fused is not None:
                self.enter = NormedProjection(fused, self._hold(spec, sources, fused), weight)
                return None, then is not None
        return self.projection(names, role, then)

    def _joined(self, names: Sequence[str], role: LinearRole) -> tuple[LinearSpec, Sources]:
        """The one linear that those names make, and what it is loaded from."""
        biased = {f"{name}.bias" in self.shapes for name in names}
        if len(biased) != 1:
            raise ValueError(f"{self.path}: of {', '.join(names)} only some have a bias; they can't be joined")
        (bias,) = biased
        kinds = ("weight", "bias") if bias else ("weight",)
        spec = LinearSpec(
            dtype=self.spec.dtype,
            in_features=self.shapes[f"{names[0]}.weight"][1],
            out_features=sum(self.shapes[f"{name}.weight"][0] for name in names),
            bias=bias,
            role=role,
            activations=self.spec.activations,
        )
        return spec, tuple(tuple(f"{self.path}.{name}.{kind}" for name in names) for kind in kinds)

    def _hold(self, spec: LinearSpec, sources: Sources, linear: Linear) -> Projection:
        projection = Projection(spec, linear, sources)
        self.holders.append(projection)
        return projection
