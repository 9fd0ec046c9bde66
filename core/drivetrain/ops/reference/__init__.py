"""What every op means: a docstring, a torch body that runs on any device, test inputs, a tolerance and a
cost.

A provider is right when it agrees with the body within the tolerance on all cases. Bodies make no tensors
from values (ranges come from existing tensors), read no value back to the host, and have no data-dependent
shapes.
"""

from drivetrain.ops.reference.adjust import ADJUST, COUNT
from drivetrain.ops.reference.attention import ATTENTION
from drivetrain.ops.reference.dense import EMBEDDING, LINEAR
from drivetrain.ops.reference.draws import DRAW
from drivetrain.ops.reference.kinds import Case, Cost, Place, ReferenceOp, Tolerance
from drivetrain.ops.reference.norms import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from drivetrain.ops.reference.pointwise import GATED_ACTIVATION, PLAIN_ACTIVATION, SOFT_CAP
from drivetrain.ops.reference.rope import ROPE, ROPE_ANGLES
from drivetrain.ops.reference.steps import KEEP, LOGPROBS, PREPARE, VERIFY

REFERENCE: dict[str, ReferenceOp] = {
    reference.op: reference
    for reference in (
        RMS_NORM,
        ADD_RMS_NORM,
        LAYER_NORM,
        ADD_LAYER_NORM,
        PLAIN_ACTIVATION,
        GATED_ACTIVATION,
        SOFT_CAP,
        ROPE_ANGLES,
        ROPE,
        EMBEDDING,
        LINEAR,
        ATTENTION,
        DRAW,
        LOGPROBS,
        VERIFY,
        KEEP,
        PREPARE,
        ADJUST,
        COUNT,
    )
}

__all__ = ["REFERENCE", "Case", "Cost", "Place", "ReferenceOp", "Tolerance"]
