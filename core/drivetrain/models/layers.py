"""One layer: two branches on one residual stream."""

from __future__ import annotations

from collections.abc import Mapping

from drivetrain.models.ffn import make_ffn
from drivetrain.models.mixers import make_mixer
from drivetrain.models.norms import Join, Norm, Sum, bind_entry, bind_norm, join_spec
from drivetrain.models.parameters import Holder, NormedProjection, PartContext, Weight
from drivetrain.models.spec import AnyNorm, LayerSpec, ModelSpec, RmsNorm, Shape
from drivetrain.models.step import Carry, StepView
from drivetrain.ops import Ops

CARRY_NAMES = ("hidden", "residual")


class Layer:
    """A mixer and a feed-forward, behind norms or before them, with the rules of its ``LayerSpec``.

    A branch's output is not added at once: it is carried as ``hidden``, and the next norm adds it to ``residual`` in
    the same op, which may do the part's first product too. In the first layer's carry there is no ``residual``:
    ``hidden`` is the stream's beginning.
    """

    def __init__(self, spec: LayerSpec, model: ModelSpec, ops: Ops, index: int) -> None:
        """``index``: the layer's number in the whole model, which its parameters' paths carry."""
        path = f"layers.{index}"
        shapes = dict(spec.parameters(model.hidden))
        own = PartContext(model, ops, path, shapes)
        mixer_norm = bind_norm(spec.mixer_norm, model.hidden, own, "mixer_norm.")
        self._leave_mixer = bind_norm(spec.post_mixer_norm, model.hidden, own, "post_mixer_norm.")
        ffn_norm = bind_norm(spec.ffn_norm, model.hidden, own, "ffn_norm.")
        self._leave_ffn = bind_norm(spec.post_ffn_norm, model.hidden, own, "post_ffn_norm.")
        mixer = _behind(spec.mixer_norm, mixer_norm, own, "mixer")
        ffn = _behind(spec.ffn_norm, ffn_norm, own, "ffn")
        self.mixer = make_mixer(spec.mixer, mixer)
        self.ffn = make_ffn(spec.ffn, ffn)
        self._enter_mixer = _entry(spec.mixer_norm, mixer_norm, own, mixer)
        self._enter_ffn = _entry(spec.ffn_norm, ffn_norm, own, ffn)
        scaled = spec.residual.kind == "scaled" and spec.residual.scale != 1.0
        self._scale = spec.residual.scale if scaled else None
        self.holders: tuple[Holder, ...] = (*own.holders, *mixer.holders, *ffn.holders)

    def forward(self, carry: Carry, step: StepView) -> Carry:
        x, stream = self._enter_mixer(carry["hidden"], carry.get("residual"))
        x = self.mixer.forward(x, step)
        if self._leave_mixer is not None:
            x = self._leave_mixer(x)
        if self._scale is not None:
            x.mul_(self._scale)  # in the branch's own result: nothing more is held
        x, stream = self._enter_ffn(x, stream)
        x = self.ffn.forward(x, step)
        if self._leave_ffn is not None:
            x = self._leave_ffn(x)
        if self._scale is not None:
            x.mul_(self._scale)  # in the branch's own result: nothing more is held
        return {"hidden": x, "residual": stream}


def _behind(norm: AnyNorm | None, alone: Norm | None, own: PartContext, name: str) -> PartContext:
    """The context of the layer's part of that name. Only an RMS norm before it may be done by its first product."""
    shapes, path = _inside(own.shapes, f"{name}."), f"{own.path}.{name}"
    if isinstance(norm, RmsNorm) and alone is not None and isinstance(alone.weight, Weight):
        joined = join_spec(norm, own.spec.hidden, own)
        return PartContext(own.spec, own.ops, path, shapes, (joined, alone.weight))
    return PartContext(own.spec, own.ops, path, shapes)


def _entry(
    norm: AnyNorm | None, alone: Norm | None, own: PartContext, part: PartContext
) -> Join | Sum | NormedProjection:
    """What a layer does before a part that has been built: addition and norm, unless the part's first product does
    them too."""
    return bind_entry(norm, own.spec.hidden, own, alone) if part.enter is None else part.enter


def _inside(shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
