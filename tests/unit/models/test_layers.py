"""What the three families hardly use, against a dense computation in float64: sinks, caps, windows, residual rules,
positions of three rows, heads of unequal sizes; and mixers from outside."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from drivetrain.models.build import build, load, planned_bytes
from drivetrain.models.decoder import Decoder
from drivetrain.models.ffn import register as register_ffn
from drivetrain.models.mixers import register
from drivetrain.models.naming import path_naming
from drivetrain.models.rope import inverse_frequencies
from drivetrain.models.spec import AttentionMixer, ModelSpec, Residual, RmsNorm, Rope
from drivetrain.models.step import ModelStep
from drivetrain.models.weights.checkpoint import TensorInfo
from drivetrain_api.v1 import CachePart, CacheSpec
from tests.unit.models.driving import Driver, reference_ops, run, small_spec

LENGTH = 41


class RandomCheckpoint:
    """Values large enough that sinks, caps and windows change the result."""

    def __init__(self, spec: ModelSpec) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            path: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 2 else 1.0)
            for path, shape in spec.parameters().items()
        }

    def infos(self):
        return {n: TensorInfo(shape=tuple(t.shape), dtype="float32", nbytes=0) for n, t in self.tensors.items()}

    def read(self, name, dtype):
        return self.tensors[name].to(dtype)

    def close(self):
        pass


def made(spec: ModelSpec) -> tuple[Decoder, dict[str, torch.Tensor]]:
    ops, checkpoint = reference_ops(), RandomCheckpoint(spec)
    decoder = build(spec, ops)
    report = load(decoder, checkpoint, ops.backend.device, naming=path_naming(spec))
    assert report.weight_bytes == planned_bytes(spec, ops)
    return decoder, {path: tensor.double() for path, tensor in checkpoint.tensors.items()}


def with_mixers(spec: ModelSpec, **changes) -> ModelSpec:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in spec.layers)
    return replace(spec, layers=layers)


# --- the dense judge -------------------------------------------------------------------------------------------------


def norm64(x, weight, norm: RmsNorm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (weight + norm.offset)


def rotate64(x, positions, rope: Rope):
    """x [T, H, D]; positions [T] or [3, T]."""
    frequencies = inverse_frequencies(rope).double()
    if positions.dim() == 2:
        rows = [row for row, count in enumerate(rope.sections) for _ in range(count)]
        phase = positions[rows].t().double() * frequencies
    else:
        phase = positions[:, None].double() * frequencies
    cos, sin = phase.cos()[:, None], phase.sin()[:, None]
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attend64(x, at, p, mixer: AttentionMixer, spec: ModelSpec, positions):
    count = x.shape[0]

    def project(name, heads, size):
        y = x @ p[f"{at}.{name}.weight"].t()
        if mixer.qkv_bias:
            y = y + p[f"{at}.{name}.bias"]
        return y.view(count, heads, size)

    q = project("q", mixer.num_heads, mixer.head_dim)
    k = project("k", mixer.num_kv_heads, mixer.head_dim)
    v = project("v", mixer.num_kv_heads, mixer.v_head_dim)
    if mixer.rope is not None:
        q, k = (rotate64(t, positions, spec.ropes[mixer.rope]) for t in (q, k))
    group = mixer.num_heads // mixer.num_kv_heads
    out = torch.zeros(count, mixer.num_heads, mixer.v_head_dim, dtype=torch.float64)
    for t in range(count):
        first = 0 if mixer.window is None else max(0, t - mixer.window + 1)
        for h in range(mixer.num_heads):
            scores = (k[first : t + 1, h // group] @ q[t, h]) * mixer.scale
            if mixer.soft_cap is not None:
                scores = mixer.soft_cap * torch.tanh(scores / mixer.soft_cap)
            weights = scores.exp()
            total = weights.sum() + (p[f"{at}.sinks"][h].exp() if mixer.sinks else 0.0)
            out[t, h] = (weights / total) @ v[first : t + 1, h // group]
    y = out.flatten(1) @ p[f"{at}.out.weight"].t()
    return y + p[f"{at}.out.bias"] if mixer.out_bias else y


def forward64(p, spec: ModelSpec, ids, positions=None):
    """Logits in float64, straight from the spec's definitions."""
    stream = p["embedding.weight"][torch.tensor(ids)] * spec.embed_scale
    positions = torch.arange(len(ids)) if positions is None else positions
    for index, layer in enumerate(spec.layers):
        at, scale = f"layers.{index}", layer.residual.scale
        x = norm64(stream, p[f"{at}.mixer_norm.weight"], layer.mixer_norm)
        stream = stream + scale * attend64(x, f"{at}.mixer", p, layer.mixer, spec, positions)
        x = norm64(stream, p[f"{at}.ffn_norm.weight"], layer.ffn_norm)
        gate, up = x @ p[f"{at}.ffn.gate.weight"].t(), x @ p[f"{at}.ffn.up.weight"].t()
        stream = stream + scale * ((gate / (1 + (-gate).exp()) * up) @ p[f"{at}.ffn.down.weight"].t())
    head = p["embedding.weight" if spec.tied else "lm_head.weight"]
    logits = norm64(stream, p["final_norm.weight"], spec.final_norm) @ head.t() / spec.logit_divisor
    return logits if spec.logit_soft_cap is None else spec.logit_soft_cap * torch.tanh(logits / spec.logit_soft_cap)


CASES = {
    "sinks": with_mixers(small_spec(), sinks=True),
    "divided logits": replace(small_spec(), logit_divisor=3.5),
    "divided and capped logits": replace(small_spec(), logit_divisor=0.5, logit_soft_cap=4.0),
    "soft caps": replace(with_mixers(small_spec(), soft_cap=2.0), logit_soft_cap=5.0),
    "sinks, cap, window": with_mixers(small_spec(), sinks=True, soft_cap=3.0, window=7),
    "scaled residual": replace(
        small_spec(),
        layers=tuple(replace(x, residual=Residual(kind="scaled", scale=0.25)) for x in small_spec().layers),
    ),
    "no positions": with_mixers(small_spec(), rope=None),
    "partly rotated": replace(small_spec(head_dim=8), ropes=(Rope(theta=100.0, rotary_dim=4),)),
    "unequal heads, biases": with_mixers(small_spec(), v_head_dim=10, qkv_bias=True, out_bias=True),
    "one head in two groups": replace(
        small_spec(),
        layers=tuple(
            replace(x, mixer=replace(x.mixer, num_heads=heads))
            for x, heads in zip(small_spec().layers, (4, 2, 4), strict=True)
        ),
    ),
    "embeddings scaled, tied": replace(small_spec(), embed_scale=3.0, tied=True),
}


@pytest.mark.parametrize("name", CASES)
def test_decoder_computes_what_its_spec_says(name):
    spec = CASES[name]
    decoder, parameters = made(spec)
    ids = [(7 * i * i + 3 * i) % 97 for i in range(LENGTH)]
    want = forward64(parameters, spec, ids)
    for pieces in ([LENGTH], [1, 6, 19, 15]):
        got = run(decoder, ids, pieces)
        assert float((got.double() - want).abs().max()) < 2e-4 * max(1.0, float(want.abs().max()))
    plain = forward64(parameters, small_spec(), ids) if spec.parameters() == small_spec().parameters() else None
    if plain is not None:
        assert float((plain - want).abs().max()) > 1e-2, "the case changes nothing"


def test_layers_are_grouped_by_state_and_planner():
    groups = made(CASES["one head in two groups"])[0].groups
    assert [group.layers for group in groups] == [(0, 2), (1,)]
    assert groups[0].spec == groups[1].spec
    windows = with_mixers(small_spec(), window=7).layers
    mixed = replace(small_spec(), layers=(windows[0], small_spec().layers[1], windows[2]))
    decoder = build(mixed, reference_ops())
    assert [(g.spec.kind, g.spec.window, g.layers) for g in decoder.groups] == [
        ("window", 7, (0, 2)),
        ("full", None, (1,)),
    ]
    assert decoder.cache_specs == tuple(decoder.groups[g].spec for g in (0, 1, 0))
    assert all(group.layout.spec == group.spec for group in decoder.groups)


def test_positions_of_three_rows_and_embeddings_in_place_of_ids():
    spec = replace(small_spec(head_dim=8), ropes=(Rope(theta=100.0, rotary_dim=8, sections=(1, 2, 1)),))
    decoder, parameters = made(spec)
    ids = list(range(1, 21))
    positions = torch.stack((torch.arange(20), torch.arange(20) // 2, torch.arange(20) % 5))
    driver = Driver(decoder)
    batch = driver._batch({0: ids})
    step = ModelStep(
        ids=torch.tensor(ids),
        positions=positions,
        token_rows=batch.token_row_dev,
        plans=tuple(group.attention.plan(batch) for group in decoder.groups),
        caches=driver._caches[0],
    )
    with torch.no_grad():
        got = decoder.logits(decoder.finish(decoder.forward(decoder.embed(torch.tensor(ids)), step)))
    want = forward64(parameters, spec, ids, positions)
    assert float((got.double() - want).abs().max()) < 2e-4 * float(want.abs().max())

    values = parameters["embedding.weight"][torch.tensor(ids)].float()
    embedded = Driver(decoder).step({0: [0] * 20}, embeds=values)[0]
    assert torch.equal(embedded, run(decoder, ids, [20]))


# --- mixers from outside ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recall:
    """A toy mixer: the branch is decay * (the state before) + x, the state a request's own, in one recurrent slot."""

    decay: float

    def parameters(self, hidden):
        return {"gain": (hidden,)}


class RecallMixer:
    def __init__(self, spec, context):
        hidden = context.spec.hidden
        self.decay = spec.decay
        self.gain = context.weight("gain")
        part = CachePart(name="state", shape=(hidden,), dtype="float32")
        self.cache_spec = CacheSpec(kind="recurrent", parts=(part,))
        self.planner = RecallPlanner()

    def place(self, layer, group):
        self.layer, self.group = layer, group

    def forward(self, x, step):
        cache, plan = step.caches[self.layer], step.plans[self.group]
        out = torch.empty_like(x)
        for row, block in enumerate(plan.state_blocks):
            (state,) = cache.read(block.view(1))
            for t in range(plan.starts[row], plan.starts[row + 1]):
                state = state * self.decay + x[t] * self.gain.value
                out[t] = state
            cache.write(block.view(1), (state,))
        return out


class RecallPlanner:
    def plan(self, batch):
        @dataclass
        class Plan:
            state_blocks: torch.Tensor
            starts: list

        return Plan(batch.block_table_dev[:, 0], batch.query_start_host.tolist())


register(Recall, RecallMixer)


def test_a_registered_mixer_keeps_a_state_of_its_own_beside_attention():
    base = small_spec()
    layers = (base.layers[0], replace(base.layers[1], mixer=Recall(decay=0.5)), base.layers[2])
    spec = replace(base, layers=layers)
    decoder, parameters = made(spec)
    assert [(g.spec.kind, g.layers) for g in decoder.groups] == [("full", (0, 2)), ("recurrent", (1,))]
    assert decoder.groups[1].attention is decoder.layers[1].mixer.planner
    assert "layers.1.mixer.gain" in parameters
    ids = list(range(30))
    driver, chunked = Driver(decoder), Driver(decoder)
    for d in (driver, chunked):
        d._caches[0][1].zero_blocks(torch.tensor(d.rows[0].blocks[:1]))
    whole = driver.step({0: ids})[0]
    parts = torch.cat([chunked.step({0: ids[:11]})[0], chunked.step({0: ids[11:]})[0]])
    assert torch.allclose(whole, parts, atol=1e-4)
    assert not torch.allclose(whole, run(made(base)[0], ids, [30]), atol=1e-2)


def test_a_type_is_registered_once_and_unknown_ones_are_named():
    with pytest.raises(ValueError, match="Recall already has a mixer"):
        register(Recall, RecallMixer)
    with pytest.raises(ValueError, match="already has a feed-forward"):
        register_ffn(type(small_spec().layers[0].ffn), RecallMixer)

    @dataclass(frozen=True)
    class Strange:
        def parameters(self, hidden):
            return {}

    for change, what in (({"mixer": Strange()}, "no mixer"), ({"ffn": Strange()}, "no feed-forward")):
        spec = small_spec()
        broken = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], **change), spec.layers[2]))
        with pytest.raises(LookupError, match=rf"layers\.1\.(mixer|ffn): {what} is registered for Strange"):
            build(broken, reference_ops())


def test_torch_calls_of_a_layer_stay_few():
    """Beside the providers' own, a layer's calls are views: the split of q, k and v, and the heads joined again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Silent:
        traits = None

        def plan(self, batch):
            return None

        def write(self, cache, k, v, plan):
            assert k.data_ptr() != 0

        def forward(self, q, cache, plan, sinks=None):
            return q

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    decoder, _ = made(small_spec())
    driver = Driver(decoder)
    batch = driver._batch({0: [1]})
    layer = decoder.layers[1]
    layer.mixer.planner = Silent()
    layer.mixer._rotate = lambda x, cos, sin: x
    layer._enter_mixer = layer._enter_ffn = lambda x, stream: (x, stream)
    layer.ffn._activate = lambda x: x[:, :28]
    step = ModelStep(
        ids=torch.tensor([1]),
        positions=batch.positions_dev,
        token_rows=batch.token_row_dev,
        plans=(None,),
        caches=driver._caches[0],
    )
    from drivetrain.models.step import StepView

    view = StepView(step, decoder._angles(step.positions))
    x = torch.randn(1, 20)
    with torch.no_grad(), Counting() as counting:
        layer.forward({"hidden": x, "residual": x}, view)
    products = [c for c in counting.calls if "mm" in c or "linear" in c]
    assert len(products) == 4
    copies = [c for c in counting.calls if any(w in c for w in ("copy", "clone", "cat", "contiguous", "_to_"))]
    assert copies == []
    assert len(counting.calls) <= 15, counting.calls
