"""Which implementation serves a spec. The ops around the matrix products are here; others join by their own makers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain_api.v1 import (
    ActivationSpec,
    AddLayerNormSpec,
    AddRmsNormSpec,
    AdjustSpec,
    CountSpec,
    Decline,
    DrawSpec,
    EmbeddingSpec,
    GatedActivationSpec,
    KeepSpec,
    LayerNormSpec,
    OpSpec,
    OpTraits,
    PrepareSpec,
    Provided,
    RmsNormSpec,
    RopeAnglesSpec,
    RopeSpec,
)

from .activations import make_gated, make_plain
from .adjust import make_adjust, make_count
from .draws import make_draw
from .embedding import make_embedding
from .layer_norms import make_add_layer, make_layer
from .norms import make_add_rms, make_rms
from .prepare import make_keep, make_prepare
from .rope import make_angles, make_rope
from .target import Target

FLOATS = ("float32", "bfloat16", "float16")
SMALL: dict[str, Callable[[Any, Target], Any]] = {
    RmsNormSpec.op: make_rms,
    AddRmsNormSpec.op: make_add_rms,
    LayerNormSpec.op: make_layer,
    AddLayerNormSpec.op: make_add_layer,
    ActivationSpec.op: make_plain,
    GatedActivationSpec.op: make_gated,
    RopeAnglesSpec.op: make_angles,
    RopeSpec.op: make_rope,
    EmbeddingSpec.op: make_embedding,
    PrepareSpec.op: make_prepare,
    KeepSpec.op: make_keep,
    DrawSpec.op: make_draw,
    AdjustSpec.op: make_adjust,
    CountSpec.op: make_count,
}
INTEGERS = {PrepareSpec.op: ("int32", "int64"), KeepSpec.op: ("int32",), CountSpec.op: ("int32",)}


def provide_small(spec: OpSpec, target: Target) -> Provided | Decline:
    """Answer for the ops of ``SMALL``: a row's bits never depend on the batch, and all can be captured."""
    make = SMALL.get(spec.op)
    if make is None:
        return Decline(reason=f"no Triton kernel for {spec.op}")
    dtypes = INTEGERS.get(spec.op, FLOATS)
    if spec.dtype not in dtypes:
        return Decline(reason=f"the Triton kernel of {spec.op} computes {', '.join(dtypes)}, not {spec.dtype}")
    traits = OpTraits(batch_invariant=True, graph="any")
    return Provided(implementation=make(spec, target), label="shared: Triton", traits=traits)
