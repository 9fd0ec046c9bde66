"""A second opinion on every op, in numpy float64 with plain loops, written from the contract's docstrings only."""

import math

import numpy as np
import torch

from drivetrain.ops.reference.philox import philox_words


def f64(tensor):
    return tensor.to(torch.float64).numpy()


def rms(x, weight, spec):
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index]
        own = weight if weight.ndim == 1 else weight[index[-1]]
        out[index] = row / math.sqrt((row**2).mean() + spec.eps) * (own + spec.offset)
    return out


def judge_rms(case):
    return (rms(f64(case.inputs["x"]), f64(case.inputs["weight"]), case.spec),)


def judge_add_rms(case):
    total = case.inputs["x"] + case.inputs["residual"]  # rounded to the dtype: the op says so
    return rms(f64(total), f64(case.inputs["weight"]), case.spec), f64(total)


def layer(x, weight, bias, spec):
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index] - x[index].mean()
        out[index] = row / math.sqrt((row**2).mean() + spec.eps) * weight + bias
    return out


def judge_layer(case):
    return (layer(f64(case.inputs["x"]), f64(case.inputs["weight"]), f64(case.inputs["bias"]), case.spec),)


def judge_add_layer(case):
    total = case.inputs["x"] + case.inputs["residual"]  # rounded to the dtype: the op says so
    return layer(f64(total), f64(case.inputs["weight"]), f64(case.inputs["bias"]), case.spec), f64(total)


ACTS = {
    "silu": lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0,
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
}


def judge_gated(case):
    x, size = f64(case.inputs["gate_up"]), case.spec.size
    gate, up = x[:, :size], x[:, size:]
    out = np.zeros_like(gate)
    for index in np.ndindex(gate.shape):
        out[index] = ACTS[case.spec.kind](gate[index]) * up[index]
    return (out,)


def judge_plain(case):
    x = f64(case.inputs["x"])
    return (np.vectorize(ACTS[case.spec.kind], otypes=[float])(x) if x.size else x,)


def judge_soft_cap(case):
    x = f64(case.inputs["x"])
    return (case.spec.cap * np.tanh(x / case.spec.cap),)


def judge_angles(case):
    positions, inv_freq = case.inputs["positions"].numpy(), case.inputs["inv_freq"].numpy()
    spec, half = case.spec, case.spec.rotary_dim // 2
    tokens = positions.shape[-1]
    cos, sin = np.zeros((tokens, half)), np.zeros((tokens, half))
    owner = np.zeros(half, int)
    if positions.ndim == 2:
        owner = np.repeat(np.arange(3), spec.sections)
    for t in range(tokens):
        for i in range(half):
            at = positions[owner[i], t] if positions.ndim == 2 else positions[t]
            phase = float(np.float32(at) * np.float32(inv_freq[i]))
            cos[t, i] = math.cos(phase) * spec.attention_factor
            sin[t, i] = math.sin(phase) * spec.attention_factor
    return cos, sin


def judge_rope(case):
    cos, sin, spec = f64(case.inputs["cos"]), f64(case.inputs["sin"]), case.spec
    half = spec.rotary_dim // 2
    x = f64(case.inputs["x"])
    y = x.copy()
    for i in range(half):
        a, b = (i, i + half) if spec.style == "halves" else (2 * i, 2 * i + 1)
        c, s = cos[:, None, i], sin[:, None, i]
        y[..., a] = x[..., a] * c - x[..., b] * s
        y[..., b] = x[..., b] * c + x[..., a] * s
    return (y,)


def judge_embedding(case):
    weight, ids = f64(case.inputs["weight"]), case.inputs["ids"].numpy()
    return (weight[ids] * case.spec.scale,)


def judge_linear(case):
    y = f64(case.inputs["x"]) @ f64(case.inputs["weight"]).T
    return (y if case.inputs["bias"] is None else y + f64(case.inputs["bias"]),)


def judge_attention(case):
    spec, rows = case.spec, case.inputs["rows"]
    q = f64(case.inputs["q"])
    out = np.zeros((len(q), spec.num_heads, spec.v_head_dim))
    sinks = None if case.inputs["sinks"] is None else f64(case.inputs["sinks"])
    token = 0
    for row, (length, queries) in enumerate(zip(rows.lengths, rows.queries, strict=True)):
        keys, values = f64(case.inputs["keys"][row]), f64(case.inputs["values"][row])
        for i in range(queries):
            position = length - queries + i
            low = 0 if spec.window is None else max(0, position - spec.window + 1)
            high = min(position + 1, length) if spec.causal else length
            for head in range(spec.num_heads):
                if length == 0 or low >= high:
                    continue
                kv = head // (spec.num_heads // spec.num_kv_heads)
                scores = keys[low:high, kv] @ q[token, head] * spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
                top = scores.max() if sinks is None else max(scores.max(), sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[head] - top))
                out[token, head] = weights @ values[low:high, kv] / total
            token += 1
    return (out,)


def noise(spec, inputs, row, stream):
    seed = int(inputs.seed[row]) & (2**64 - 1)
    out = np.zeros(spec.vocabulary, np.float32)
    for i in range(spec.vocabulary):
        token = spec.vocabulary_offset + i
        counter = (token // 4, int(inputs.position[row]), int(inputs.sample[row]), stream)
        x = philox_words(counter, (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
        u = (x + 0.5) * 2.0**-32
        out[i] = -math.log(-math.log1p(-u))
    return out


def kept(scaled, top_k, top_p, min_p):
    """Which of a row's tokens the filters leave; scaled float32, -inf where masked."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = [math.exp(float(scaled[i]) - float(scaled[order[0]])) for i in order]
        total, before, nucleus = math.fsum(weights), 0.0, []
        for i, weight in zip(order, weights, strict=True):
            if before / total >= top_p and nucleus:
                break
            nucleus.append(i)
            before += weight
        order = nucleus
    best = float(scaled[order[0]])
    return [i for i in order if math.exp(float(scaled[i]) - best) >= min_p]


def judge_draw(case):
    spec, inputs, stream = case.spec, case.inputs["inputs"], case.inputs["stream"]
    logits = case.inputs["logits"].to(torch.float32).numpy().copy()
    tokens = []
    for row in range(len(logits)):
        if inputs.mask is not None:
            for i in range(spec.vocabulary):
                if not (int(inputs.mask[row, i // 32]) >> (i % 32)) & 1:
                    logits[row, i] = -np.inf
        temperature = np.float32(inputs.temperature[row])
        if temperature == 0:
            tokens.append(int(logits[row].argmax()) + spec.vocabulary_offset)
            continue
        scaled = logits[row] / temperature
        left = kept(scaled, int(inputs.top_k[row]), float(inputs.top_p[row]), float(inputs.min_p[row]))
        scores = np.full(spec.vocabulary, -np.inf, np.float32)
        scores[left] = (scaled + noise(spec, inputs, row, stream))[left]
        tokens.append(int(scores.argmax()) + spec.vocabulary_offset)
    return (np.asarray(tokens, np.int64),)


def judge_logprobs(case):
    logits, tokens, k = f64(case.inputs["logits"]), case.inputs["tokens"].numpy(), case.inputs["k"]
    rows = len(logits)
    logs = np.zeros_like(logits)
    for row in range(rows):
        top = logits[row].max()
        logs[row] = logits[row] - top - math.log(np.exp(logits[row] - top).sum())
    order = np.array([sorted(range(logits.shape[1]), key=lambda i: (-row[i], i)) for row in logits], int)
    order = order.reshape(logits.shape)
    own = np.array([logs[r, t] for r, t in enumerate(tokens)])
    rank = np.array([1 + list(order[r]).index(t) for r, t in enumerate(tokens)], int)
    best = order[:, :k] if rows else np.zeros((0, k), int)
    return own, rank, best, np.take_along_axis(logs, best, -1)


def judge_verify(case):
    accepted = []
    for draws, drafts, count in zip(
        case.inputs["draws"].tolist(), case.inputs["drafts"].tolist(), case.inputs["num_drafts"].tolist(), strict=True
    ):
        n = 0
        while n < count and draws[n] == drafts[n]:
            n += 1
        accepted.append(n + 1)
    return (np.asarray(accepted, int),)


def judge_keep(case):
    tokens, witness, rows = (case.inputs[name].numpy() for name in ("tokens", "witness", "rows"))
    table = case.inputs["last_tokens"].numpy().copy()
    for token, row in zip(tokens, rows, strict=True):
        table[row, 0] = token
    return np.concatenate((tokens, witness.view(np.int32))), table


def judge_adjust(case):
    logits, inputs = f64(case.inputs["logits"]), case.inputs["inputs"]
    return np.array([adjusted(row, n, inputs) for n, row in enumerate(logits)]).reshape(logits.shape), logits


def adjusted(row, n, inputs):
    """One row, token by token, from Python numbers."""
    slot, position, out = int(inputs.slots[n]), int(inputs.position[n]), row.tolist()
    if inputs.any_bias:
        for token, value in zip(inputs.bias_ids[slot].tolist(), inputs.bias_values[slot].tolist(), strict=True):
            if token >= 0:
                out[token] += value
    repetition, presence, frequency = (
        float(values[slot]) for values in (inputs.repetition, inputs.presence, inputs.frequency)
    )
    for token, word in enumerate(inputs.counts[slot].tolist()) if inputs.any_penalty else ():
        drawn = word % (1 << 30)
        if word:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        if drawn:
            out[token] -= frequency * drawn + presence
    if inputs.any_held and position < int(inputs.first_stop[slot]):
        for token in inputs.held_ids[slot].tolist():
            if token >= 0:
                out[token] = -math.inf
    ring = inputs.recent.shape[1]
    for *before, last in inputs.bad_words[slot].tolist() if inputs.any_bad_words else ():
        places = range(position - len(before), position)
        past = [int(inputs.recent[slot, place % ring]) for place in places]
        if last >= 0 and all(want in (-1, got) for want, got in zip(before, past, strict=True)):
            out[last] = -math.inf
    return out


def judge_count(case):
    counts, recent = (case.inputs[name].numpy().copy() for name in ("counts", "recent"))
    columns = (case.inputs[name].tolist() for name in ("tokens", "slots", "position"))
    for token, slot, position in zip(*columns, strict=True):
        counts[slot, token] += 1
        recent[slot, position % recent.shape[1]] = token
    return counts, recent


def judge_prepare(case):
    inputs, widths = case.inputs["inputs"], case.inputs["widths"]
    rows, start, new = inputs.rows.tolist(), inputs.start.tolist(), inputs.num_new.tolist()
    base = [s if s >= 0 else int(inputs.computed[r]) for r, s in zip(rows, start, strict=True)]
    lengths = [b + n if n else 0 for b, n in zip(base, new, strict=True)]
    tables = [t.numpy()[rows, :w] for t, w in zip(inputs.block_tables, widths, strict=True)]
    ids, positions, slots = [], [], [[] for _ in tables]
    for t, (b, offset) in enumerate(zip(inputs.token_row.tolist(), inputs.token_offset.tolist(), strict=True)):
        if offset >= new[b]:
            ids.append(0)
            positions.append(0)
            for each in slots:
                each.append(0)
            continue
        position = base[b] + offset
        ids.append(int(inputs.host_ids[t]) if start[b] >= 0 else int(inputs.last_tokens[rows[b], offset]))
        positions.append(position)
        for each, table, size in zip(slots, tables, case.spec.block_tokens, strict=True):
            each.append(int(table[b, position // size]) * size + position % size)
    computed = inputs.computed.numpy().copy()
    for r, length in zip(rows, lengths, strict=True):
        computed[r] = length
    return tuple(np.asarray(v) for v in (ids, positions, base, lengths, *tables, *slots, computed))


JUDGES = {
    "norm.rms/1": judge_rms,
    "norm.add_rms/1": judge_add_rms,
    "norm.layer/1": judge_layer,
    "norm.add_layer/1": judge_add_layer,
    "activation.plain/1": judge_plain,
    "activation.gated/1": judge_gated,
    "soft_cap/1": judge_soft_cap,
    "rope.angles/1": judge_angles,
    "rope.apply/1": judge_rope,
    "embedding/1": judge_embedding,
    "linear/1": judge_linear,
    "attention.paged/1": judge_attention,
    "sample.draw/1": judge_draw,
    "sample.logprobs/1": judge_logprobs,
    "sample.verify/1": judge_verify,
    "sample.keep/1": judge_keep,
    "input.prepare/1": judge_prepare,
    "sample.adjust/1": judge_adjust,
    "sample.count/1": judge_count,
}


def check(case, outputs, tolerance):
    """Compare a case's outputs with the judge's; the message names case, output and the worst difference."""
    wanted = JUDGES[case.spec.op](case)
    assert len(outputs) == len(wanted), case.name
    for number, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        value = f64(got)
        assert value.shape == want.shape, f"{case.name}, output {number}: {value.shape} is not {want.shape}"
        slack = tolerance.atol + tolerance.rtol * np.abs(want)
        with np.errstate(invalid="ignore"):
            excess = np.where(value == want, 0.0, np.abs(value - want)) - np.where(np.isinf(want), 0.0, slack)
        assert (excess <= 0).all(), f"{case.name}, output {number}: beyond the tolerance by {excess.max()}"
