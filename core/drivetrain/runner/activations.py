"""What one step holds while it runs, from the model's sizes: an upper bound by counting live tensors.

Counted on ``Layer.forward``, ``Attention.forward`` and ``Sampler.run``: a change there changes the counts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.models.spec import AttentionMixer, GatedMlp, LayerSpec, ModelSpec, PlainMlp
from drivetrain.runner.drawing import (
    BESIDE_BYTES,
    DRAW_BYTES,
    DRAW_ELEMENT,
    LOGIT_BYTES,
    SCALED_ELEMENT,
    adjust_element,
    on_reference,
    rows_at_once,
)
from drivetrain_api.v1 import DrawSpec, dtype_bytes

if TYPE_CHECKING:
    from drivetrain.models.decoder import CacheGroup, Decoder
    from drivetrain.ops import Ops
    from drivetrain.runner.sizes import RunnerConfig

NORM_OPS = ("norm.add_rms/1", "norm.rms/1", "norm.add_layer/1", "norm.layer/1")
LAYER_OPS = (*NORM_OPS, "activation.gated/1", "activation.plain/1", "rope.apply/1", "linear/1", "attention.paged/1")
REFERENCE_CHUNK = 256 << 20
REFERENCE_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest step. ``logits``: rows that sample; ``workspace``: bytes of attention beside its in- and outputs.

    ``reference_draw``: whether draws run on the reference, whose noise is computed for every token; ``filters``:
    whether the scaled logits of a backend's own filters are counted, and log-probabilities. ``lean``: no op of the
    layers runs on the reference, which holds what it computes in float32 too. ``apart``: of steps of up to so many
    tokens, the most tokens for which gate and up products lie in memory beside what their activation gives.
    ``adjusts``: bytes a logit beside its own while penalties and biases change it (0: never).
    """

    tokens: int
    logits: int
    workspace: int
    reference_draw: bool
    filters: bool = False
    lean: bool = False
    apart: Callable[[int], int] = int
    adjusts: int = 0

    @staticmethod
    def of(decoder: Decoder, ops: Ops, config: RunnerConfig) -> StepSizes:
        """Read them off a bound decoder."""
        tokens = config.max_num_batched_tokens
        draw = DrawSpec(dtype="float32", vocabulary=decoder.spec.vocabulary)
        ops.bind(draw)
        return StepSizes(
            tokens=tokens,
            logits=min(tokens, config.max_num_seqs * (config.max_drafts + 1)),
            workspace=max((attention_workspace(group, config) for group in decoder.groups), default=0),
            reference_draw=on_reference(ops, draw),
            lean=not any(choice.provider == "reference" and choice.op in LAYER_OPS for choice in ops.report),
            apart=ops.gated_apart,
            adjusts=adjust_element(ops, decoder.spec.vocabulary) if config.max_adjusted else 0,
        )


def attention_workspace(group: CacheGroup, config: RunnerConfig) -> int:
    """Return what attention of a group holds at most: what its provider declares, else what the reference takes."""
    traits = getattr(group.attention, "traits", None)
    if traits is None:
        return 0
    if traits.workspace_bytes:
        return int(traits.workspace_bytes)
    slot_bytes = 2 * -(-group.layout.bytes_per_block // group.layout.block_tokens)
    gathered = config.max_num_seqs * config.max_model_len * slot_bytes
    return REFERENCE_COPIES * min(REFERENCE_CHUNK, gathered)


def layer_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return the bytes of the largest layer's peak, all query tokens at once."""
    if sizes.lean and spec.activation_dtype != "float32":
        size = dtype_bytes(spec.activation_dtype)
        inside = max((lean_bytes(layer, spec.hidden, size, apart=False) for layer in spec.layers), default=0)
        apart = max((lean_bytes(layer, spec.hidden, size) for layer in spec.layers), default=0)
        return max(sizes.tokens * inside, sizes.apart(sizes.tokens) * apart) + sizes.workspace
    elements = max((live_elements(layer, spec.hidden) for layer in spec.layers), default=0)
    return sizes.tokens * elements * _element_bytes(spec) + sizes.workspace


def lean_bytes(layer: LayerSpec, hidden: int, size: int, apart: bool = True) -> int:
    """Return the bytes a token that are live at once at a layer's peak where ops hold nothing but their results.

    ``size``: of an element. Beside the carry, the normed input and the new stream (streams are float32) lie in the
    mixer q, k and v, then q and k rotated, and beside those q and k normed, or the result where all of it is one run;
    in the feed-forward gate and up (where they lie ``apart`` from their activation), the activated half, the output.
    """
    mixer, ffn = layer.mixer, layer.ffn
    inner = forward = 0
    if isinstance(mixer, AttentionMixer):
        q, k = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        v, out = mixer.num_kv_heads * mixer.v_head_dim, mixer.num_heads * mixer.v_head_dim
        inner = (q + k + v) + (q + k) + (out if mixer.head_norm is None else max(out, q + k))
    if isinstance(ffn, GatedMlp):
        forward = (3 if apart else 1) * ffn.intermediate + hidden
    elif isinstance(ffn, PlainMlp):
        forward = ffn.intermediate + max(ffn.intermediate, hidden)  # the wide product is gone before the last
    return hidden * (2 * size + 2 * 4) + max(inner, forward) * size


def _element_bytes(spec: ModelSpec) -> int:
    """Bytes of a live element; below float32 most of them are also held in float32 for a moment."""
    return 4 if spec.activation_dtype == "float32" else 4 + dtype_bytes(spec.activation_dtype)


def live_elements(layer: LayerSpec, hidden: int) -> int:
    """Return the elements a token that are live at once at a layer's peak: in its mixer or its feed-forward.

    Beside either lie the carry that came in (two streams), the normed input and the new stream. In the mixer: the
    fused q, k, v, then q and k after their norms and again after rotation, and the result. In the feed-forward: the
    mixer's output too, gate and up side by side, the activated half, the product, and the output.
    """
    mixer, ffn = layer.mixer, layer.ffn
    inner = 0
    if isinstance(mixer, AttentionMixer):
        q, k = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        v, out = mixer.num_kv_heads * mixer.v_head_dim, mixer.num_heads * mixer.v_head_dim
        inner = (q + k + v) + 2 * (q + k) + out
    forward = 0
    if isinstance(ffn, GatedMlp | PlainMlp):
        forward = (4 if isinstance(ffn, GatedMlp) else 2) * ffn.intermediate
    return max(4 * hidden + inner, 6 * hidden + forward)


def sampling_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return the bytes of sampling's peak: hidden states of all rows that sample, logits of those that are done at
    once, and the larger of what lies beside float32 logits: while they are made, their own type's and the cap's; once
    they are, what draws and log-probabilities hold."""
    beside = _element_bytes(spec) - 4 + (8 if spec.logit_soft_cap is not None else 0)
    rows = rows_at_once(sizes.logits, spec.vocabulary, LOGIT_BYTES, 4)
    drawn = rows_at_once(rows, spec.vocabulary, DRAW_BYTES, DRAW_ELEMENT) * DRAW_ELEMENT
    if not sizes.reference_draw:
        filtered = rows_at_once(rows, spec.vocabulary, BESIDE_BYTES, SCALED_ELEMENT) * SCALED_ELEMENT
        reported = rows_at_once(rows, spec.vocabulary, BESIDE_BYTES, DRAW_ELEMENT) * DRAW_ELEMENT
        drawn = max(filtered, reported) if sizes.filters else DRAW_ELEMENT
    if sizes.adjusts:
        drawn = max(drawn, rows_at_once(rows, spec.vocabulary, BESIDE_BYTES, sizes.adjusts) * sizes.adjusts)
    hidden = 3 * sizes.logits * spec.hidden * dtype_bytes(spec.activation_dtype)
    return hidden + spec.vocabulary * (rows * 4 + max(rows * beside, drawn))
