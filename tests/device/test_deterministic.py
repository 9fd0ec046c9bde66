"""``--deterministic``: a row's bits are its own, whatever else is in the batch and however it is cut."""

from __future__ import annotations

import warnings

import pytest
import torch

from drivetrain.config import EngineConfig
from drivetrain.launch import view_of
from drivetrain.ops.cases.attention import Shape
from drivetrain.ops.reference import REFERENCE, Place
from drivetrain.params import SamplingParams
from drivetrain.select.choose import open_backend
from drivetrain_api.v1 import Decline, LinearSpec
from tests.checkpoints import hf_greedy, random_ids
from tests.device.models import checkpoint
from tests.device.test_ops import on_host, poison
from tests.e2e.harness import Served, choice_of
from tests.unit.ops.invariance import SHAPES, Sequence, check_attention
from tests.unit.ops.judges import check

pytestmark = pytest.mark.device
ROWS = (1, 2, 8, 64, 65, 300, 4096)
WEIGHTS = [(4096, 4096, False), (1024, 3072, True), (1000, 1096, True), (28672, 1024, False), (47, 264, True)]
PROMPTS = [random_ids(40, 1), random_ids(5, 2), random_ids(271, 3), random_ids(33, 4), random_ids(150, 5)]
REPORTED = SamplingParams(temperature=0.0, logprobs=5)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, logprobs=5)
NEW = 24


@pytest.fixture(scope="module")
def steady(device):
    """A backend of the device whose view says deterministic."""
    choice = choice_of(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view = view_of(EngineConfig(model="none", device=device, deterministic=True), choice)
        opened = open_backend(choice, view)
    if not opened.capabilities.deterministic:
        pytest.skip("the backend does not promise it")
    yield opened
    opened.close()


def bound(backend, spec):
    answer = backend.provide(spec)
    if isinstance(answer, Decline):
        pytest.skip(answer.reason)
    assert answer.traits.batch_invariant
    return answer.implementation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["linear/1", "attention.paged/1"])
def test_every_case_agrees_with_float64(steady, op, dtype):
    reference, runtime = REFERENCE[op], steady.device
    for case in reference.cases(Place(runtime=runtime, storage=steady.storage), dtype, 31):
        answer = steady.provide(case.spec)
        if isinstance(answer, Decline):
            continue
        poison(runtime)
        check(case, on_host(runtime, case.run(answer.implementation)), reference.tolerance(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("outs", "ins", "biased"), WEIGHTS)
@pytest.mark.parametrize("role", ["", "lm_head"])
def test_linear_rows_keep_their_bits(steady, outs, ins, biased, dtype, role):
    if dtype not in steady.capabilities.model_dtypes:
        pytest.skip(f"no {dtype}")
    device, kind = steady.device.device, getattr(torch, dtype)
    linear = bound(steady, LinearSpec(dtype=dtype, in_features=ins, out_features=outs, bias=biased, role=role))
    torch.manual_seed(0)
    weight = (torch.randn(outs, ins, device=device) * ins**-0.5).to(kind)
    packed = linear.pack(weight, torch.randn(outs, device=device).to(kind) if biased else None)
    x = torch.randn(ROWS[-1], ins, device=device).to(kind)
    whole = linear.apply(x, packed)
    want = x[:64].double() @ weight.double().T + (0 if packed.data[1] is None else packed.data[1].double())
    rtol = 1e-5 if dtype == "float32" else 1.6e-2
    torch.testing.assert_close(whole[:64].double(), want, rtol=rtol, atol=4 * rtol if dtype == "float32" else 1e-2)
    order = torch.randperm(len(x), device=device)
    assert torch.equal(linear.apply(x[order], packed), whole[order]), "another order"
    for rows in ROWS[:-1]:
        for first in (0, 37, len(x) - rows):
            got = linear.apply(x[first : first + rows], packed)
            assert torch.equal(got, whole[first : first + rows]), f"{rows} rows from {first}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_keeps_its_bits(steady, shape, dtype):
    check_attention(
        lambda spec: bound(steady, spec), Place(runtime=steady.device, storage=steady.storage), shape, dtype
    )


LONG = (
    Shape(heads=32, kv_heads=8, head_dim=128, v_head_dim=128),
    Shape(heads=16, kv_heads=8, head_dim=64, v_head_dim=64, sinks=True),
    Shape(heads=8, kv_heads=4, head_dim=128, v_head_dim=128, window=1000),
    Shape(heads=4, kv_heads=2, head_dim=256, v_head_dim=256, window=600, soft_cap=30.0),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", LONG)
def test_attention_over_many_ranges_keeps_its_bits(steady, shape, dtype):
    """Queries 1, 2, 8, 64, 65, 300 and 4096 at once, alone and among others; a lone row's ranges by pieces."""
    if dtype not in steady.capabilities.model_dtypes:
        pytest.skip(f"no {dtype}")
    length = ROWS[-1]
    sequence = Sequence(Place(runtime=steady.device, storage=steady.storage), shape, dtype, length, 9)
    attention = bound(steady, sequence.spec)
    whole = sequence.chunk(attention, 0, length)
    assert whole.isfinite().all()
    company = ((40, 1), (700, 1), (3000, 1), (2500, 600), (0, 1))
    for queries in ROWS[:-1]:
        for end in (queries, 511 + queries, 2000, length):
            first = end - queries
            alone = sequence.chunk(attention, first, end)
            assert torch.equal(alone, whole[first:end]), f"{queries} queries up to {end}"
            if end in (2000, length):
                mixed = sequence.chunk(attention, first, end, company, slack=3)
                assert torch.equal(mixed, whole[first:end]), f"{queries} queries up to {end}, among others"


@pytest.fixture(scope="module", params=["llama-even", "qwen3-even", "gemma3-even", "llama-biases"])
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("device"))


def served_with(model, device, **settings):
    usual = {"dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 512, "cache_bytes": 32 << 20}
    return Served(model, device, **(usual | {"deterministic": True, "max_num_seqs": 16} | settings))


def lines_of(served, sampling, prompts=PROMPTS, company=0):
    """Tokens and the bits of their log-probabilities, each prompt among ``company`` others."""
    others = [served.submit(random_ids(11 * i + 3, 30 + i), 20) for i in range(company)]
    numbers = [served.submit(p, NEW, sampling, seed=7 + PROMPTS.index(p)) for p in prompts]
    served.run()
    assert all(served.open[n].end is not None for n in others)
    done = [served.open[n] for n in numbers]
    return [(one.tokens, [(at.logprob, at.top_ids, at.top_logprobs) for at in one.logprobs]) for one in done]


@pytest.mark.parametrize("sampling", [REPORTED, DRAWN], ids=["greedy", "drawn"])
def test_a_request_alone_equals_itself_in_company(model, device, sampling):
    served = served_with(model, device, enable_prefix_caching=False)
    alone = [lines_of(served, sampling, [prompt])[0] for prompt in PROMPTS]
    for company in (0, 1, 3, 11):
        assert lines_of(served, sampling, company=company) == alone, f"among {company} others"
    served.close()


def test_graphs_chunks_depth_and_cached_prefixes_change_nothing(model, device, without_graphs):
    served = served_with(model, device, enable_prefix_caching=False)
    want = lines_of(served, REPORTED)
    served.close()
    for settings in (
        without_graphs,
        {"depth": 1},
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
        {"max_num_batched_tokens": 128, "max_num_seqs": 4, **without_graphs},
        {"enable_prefix_caching": True},
    ):
        served = served_with(model, device, **settings)
        for turn in range(2):
            assert lines_of(served, REPORTED, company=3 * turn) == want, f"{settings}, turn {turn}"
        served.close()


def test_tokens_in_float32_are_those_of_transformers(model, device):
    served = served_with(model, device, dtype="float32")
    assert served.greedy(PROMPTS, NEW) == hf_greedy(model, PROMPTS, NEW)
    served.close()
