"""The generator's known answers, and the distribution of what is drawn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from drivetrain.ops.cases.sampling import sampling_inputs
from drivetrain.ops.cases.source import Source
from drivetrain.ops.reference import REFERENCE
from drivetrain.ops.reference.philox import gumbel, philox, philox_words, uniform
from drivetrain_api.v1 import DrawSpec

# Known answers of philox4x32 with 10 rounds, published with the Random123 library: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox_words(counter, key) == words
    got = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in got) == words


def test_tensor_and_integer_forms_agree():
    random = np.random.default_rng(5)
    counters = random.integers(0, 2**32, (200, 4), np.int64)
    keys = random.integers(0, 2**32, (200, 2), np.int64)
    got = philox(tuple(torch.from_numpy(counters.T.copy())), tuple(torch.from_numpy(keys.T.copy())))
    want = [philox_words(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert torch.stack(got, -1).tolist() == [list(w) for w in want]


def test_noise_is_finite_at_both_ends():
    ends = torch.tensor([0, 0xFFFFFFFF])
    assert uniform(ends).tolist() == [2.0**-33, 1 - 2.0**-33]
    low, high = gumbel(ends.flip(0)).tolist()
    assert -3.13 < low < -3.12 and 22.87 < high < 22.88


def inputs_for(rows, seed, **changes):
    plain = sampling_inputs(Source("float32", 0), rows, 16, filters=False)
    return replace(
        plain,
        temperature=torch.full((rows,), 0.7),
        seed=torch.full((rows,), seed, dtype=torch.int64),
        position=torch.arange(rows, dtype=torch.int32),
        sample=torch.zeros(rows, dtype=torch.int32),
        **changes,
    )


def chi_square(counts, probabilities, total):
    expected = probabilities * total
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345])
def test_draws_follow_the_softmax(seed):
    rows, vocabulary = 20_000, 13
    logits = torch.linspace(-2.0, 1.5, vocabulary)
    draw = REFERENCE["sample.draw/1"].make(DrawSpec(dtype="float32", vocabulary=vocabulary))
    tokens = draw(logits.expand(rows, -1).contiguous(), inputs_for(rows, seed), 0)
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    wanted = (logits.to(torch.float64) / 0.7).softmax(0).numpy()
    assert chi_square(counts, wanted, rows) < 39.1  # 12 degrees of freedom, one in 10,000
    assert chi_square(counts, np.roll(wanted, 1), rows) > 1000


def test_draws_follow_the_filtered_softmax():
    rows, vocabulary = 20_000, 13
    logits = torch.linspace(-2.0, 1.5, vocabulary)
    inputs = inputs_for(rows, 3, top_k=torch.full((rows,), 6, dtype=torch.int32), any_top_k=True)
    draw = REFERENCE["sample.draw/1"].make(DrawSpec(dtype="float32", vocabulary=vocabulary))
    counts = np.bincount(draw(logits.expand(rows, -1).contiguous(), inputs, 0).numpy(), minlength=vocabulary)
    assert counts[:7].sum() == 0
    wanted = (logits[7:].to(torch.float64) / 0.7).softmax(0).numpy()
    assert chi_square(counts[7:], wanted, rows) < 25.7  # 5 degrees of freedom, one in 10,000


def test_sharded_vocabulary_draws_the_same_noise():
    """Two halves of a vocabulary see the noise of the whole: their best scores give the whole's token."""
    from drivetrain.ops.reference.draws import noise

    inputs = inputs_for(9, 77)
    whole = noise(DrawSpec(dtype="float32", vocabulary=31), inputs, 2)
    for cut in (8, 13, 15):
        left = noise(DrawSpec(dtype="float32", vocabulary=cut), inputs, 2)
        right = noise(DrawSpec(dtype="float32", vocabulary=31 - cut, vocabulary_offset=cut), inputs, 2)
        assert torch.equal(torch.cat((left, right), 1), whole)


def test_seed_position_sample_and_stream_all_matter():
    from drivetrain.ops.reference.draws import noise

    spec = DrawSpec(dtype="float32", vocabulary=24)
    base = inputs_for(1, 5)
    rows = [
        noise(spec, base, 0),
        noise(spec, base, 1),
        noise(spec, replace(base, seed=base.seed + 1), 0),
        noise(spec, replace(base, seed=base.seed + (1 << 32)), 0),
        noise(spec, replace(base, position=base.position + 1), 0),
        noise(spec, replace(base, sample=base.sample + 1), 0),
    ]
    assert len({tuple(r[0].tolist()) for r in rows}) == len(rows)
