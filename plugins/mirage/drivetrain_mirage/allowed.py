"""What the device runs: aten ops by schema name, in-place forms under the name of the plain one.

The list is what the engine's reference ops, runner and models use, and no more: an engine that begins to need another
op needs it from every vendor.
"""

from __future__ import annotations

import torch

# Views: done on the host, at once, over the storage.
VIEWS = frozenset(
    "alias detach expand permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze "
    "view _unsafe_view".split()
)
POINTWISE = frozenset(
    "_to_copy __lshift__ __rshift__ abs add bitwise_and bitwise_not bitwise_or bitwise_xor clamp clone copy cos div "
    "eq exp fill floor_divide ge gt le log log1p lt masked_fill maximum mul ne neg pow remainder rsqrt rsub sin sub "
    "tanh where zero".split()
)
REDUCTIONS = frozenset("amax argmax cumprod cumsum mean sum".split())
SHAPES = frozenset("cat constant_pad_nd empty_like full_like new_full new_ones new_zeros stack zeros_like".split())
INDEXED = frozenset("embedding gather index index_put index_select scatter sort".split())
PRODUCTS = frozenset("addmm bmm linear mm".split())
ACTIVATIONS = frozenset("_log_softmax gelu silu".split())

DECLARED_OPS = VIEWS | POINTWISE | REDUCTIONS | SHAPES | INDEXED | PRODUCTS | ACTIVATIONS
# Composite in torch, but run as one piece of work here.
WHOLE = frozenset("linear".split())
# Where float64 may pass: values between pointwise ops and reductions, never a product, never stored by the runtime.
DOUBLE_OPS = (POINTWISE | REDUCTIONS | VIEWS | SHAPES) - {"mean"}
DECLARED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool})

HOST_READS = frozenset(
    "_local_scalar_dense item is_nonzero equal allclose numpy_T __bool__ is_set_to _is_all_true _is_any_true".split()
)
VALUE_SHAPES = frozenset(
    "nonzero nonzero_numpy masked_select _unique _unique2 unique_dim unique_consecutive bincount "
    "repeat_interleave argwhere".split()
)


def op_name(func: torch._ops.OpOverload) -> str:
    """Return the op's name without namespace; ``add_`` gives ``add``, dunder names stay."""
    name = func._schema.name.removeprefix("aten::")
    return name if name.endswith("__") else name.rstrip("_")
