"""``Completer`` over a loop that plays back letters: order, samples, stop strings, failures, early exits."""

from __future__ import annotations

import numpy as np
import pytest

from drivetrain.completing import Completer
from drivetrain.errors import DrivetrainError, RequestError
from drivetrain.fanout import FanOut, Prompt, check_budget
from drivetrain.params import Finished, PoolingParams, SamplingParams, Started, StepOutputs, TokenLogprobs

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """Tokens are code points; one token is one character."""

    eos_ids = (0,)
    has_template = True

    def encode(self, text, special):
        return np.array([ord(c) for c in text], np.int32)

    def chat(self, messages, options):
        return self.encode("".join(m["content"] for m in messages), True)

    def detokenizer(self, prompt, *, skip_special):
        return Joined()

    def stops(self, strings, *, include):
        return HoldBack(strings[0], include)


class Joined:
    def add(self, ids):
        return "".join(map(chr, ids))

    def finish(self):
        return ""


class HoldBack:
    """Holds everything that could begin the one stop string."""

    def __init__(self, stop, include):
        self.stop, self.include, self.held, self.matched = stop, include, "", None

    def add(self, text):
        self.held += text
        if (at := self.held.find(self.stop)) >= 0:
            self.matched = self.stop
            return self.held[: at + (len(self.stop) if self.include else 0)]
        keep = next(k for k in range(len(self.stop) - 1, -1, -1) if self.held.endswith(self.stop[:k]) or k == 0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out

    def finish(self):
        return self.held


class PlayLoop:
    """Each request gets the letters after its prompt's last, two a step, until its limit. ``!`` fails at once."""

    def __init__(self):
        self.requests, self.made, self.aborted, self.order = {}, {}, [], []

    def submit(self, request):
        self.requests[request.request_id] = request
        self.made[request.request_id] = 0
        self.order.append(request)

    def abort(self, request_id):
        if self.requests.pop(request_id, None):
            self.aborted.append(request_id)

    def step(self):
        ids, counts, tokens, started, finished, logprobs = [], [], [], [], [], []
        for request_id in reversed(list(self.requests)):  # answers never come in the order of the prompts
            request, made = self.requests[request_id], self.made[request_id]
            last = int(request.prompt_ids[-1])
            if last == ord("!"):
                finished.append(Finished(request_id=request_id, reason="error", error="planted"))
                del self.requests[request_id]
                continue
            if request.pooling:
                vector = request.prompt_ids.astype(np.float32)
                finished.append(Finished(request_id=request_id, reason="stop", pooled=vector))
                del self.requests[request_id]
                continue
            if not made:
                started.append(Started(request_id=request_id, num_cached=10 + request.sample_index))
            new = [ord(LETTERS[(last - 96 + made + k) % 26]) for k in range(min(2, request.max_tokens - made))]
            for token in new if request.sampling.logprobs is not None else ():
                logprobs.append((request_id, TokenLogprobs(token=token, logprob=-1.0, rank=1)))
            self.made[request_id] += len(new)
            ids.append(request_id)
            counts.append(len(new))
            tokens += new
            if self.made[request_id] == request.max_tokens:
                finished.append(Finished(request_id=request_id, reason="length"))
                del self.requests[request_id]
        return (
            StepOutputs(
                request_ids=np.array(ids, np.int64),
                counts=np.array(counts, np.int32),
                tokens=np.array(tokens, np.int32),
                started=tuple(started),
                finished=tuple(finished),
                logprobs=tuple(logprobs),
            ),
        )


@pytest.fixture
def loop():
    return PlayLoop()


@pytest.fixture
def completer(loop):
    return Completer(loop, Letters(), longest=30)


def ids(text):
    return Letters().encode(text, True)


def greedy(**more):
    return SamplingParams(temperature=0.0, **{"max_tokens": 5} | more)


def test_answers_come_in_the_order_of_the_prompts(completer):
    outputs = completer.complete([ids("a"), ids("xm"), ids("q")], [greedy(), greedy(max_tokens=2), greedy()])
    assert [o.completions[0].text for o in outputs] == ["bcdef", "no", "rstuv"]
    assert [o.completions[0].finish_reason for o in outputs] == ["length"] * 3
    assert outputs[1].prompt_ids == (ord("x"), ord("m"))
    assert outputs[1].completions[0].token_ids == (ord("n"), ord("o"))
    assert outputs[0].completions[0].logprobs is None


def test_samples_share_a_seed_and_a_fanout_and_keep_their_index(completer, loop):
    (output,) = completer.complete([ids("a")], [greedy(n=3, seed=-1)])
    assert [c.index for c in output.completions] == [0, 1, 2]
    assert output.num_cached == 10, "what the first sample found, not what its siblings shared"
    assert [r.sample_index for r in loop.order] == [0, 1, 2]
    assert {r.seed for r in loop.order} == {2**64 - 1}
    assert len({r.fanout for r in loop.order}) == 1 and loop.order[0].fanout is not None


@pytest.mark.parametrize(
    "stop,include,text,count", [("de", False, "bc", 4), ("de", True, "bcde", 4), ("fz", False, "bcdef", 5)]
)
def test_a_stop_string_across_steps(completer, loop, stop, include, text, count):
    params = greedy(stop=(stop,), include_stop_str_in_output=include, max_tokens=5)
    completion = completer.complete([ids("a")], [params])[0].completions[0]
    assert (completion.text, len(completion.token_ids)) == (text, count)
    assert completion.finish_reason == ("length" if stop == "fz" else "stop")
    assert loop.aborted == ([] if stop == "fz" else [loop.order[0].request_id]) and not loop.requests


def test_logprobs_come_one_a_token_of_the_text(completer):
    params = greedy(stop=("de",), logprobs=0, max_tokens=8)
    completion = completer.complete([ids("a")], [params])[0].completions[0]
    assert [chr(r.token) for r in completion.logprobs] == ["b", "c"]


def test_a_stream_equals_the_whole_answer(completer):
    whole = completer.complete([ids("a")], [greedy(n=2)])[0]
    texts = ["", ""]
    ends = []
    for delta in completer.stream(ids("a"), greedy(n=2)):
        texts[delta.index] += delta.text
        ends += [delta.index] if delta.finish else []
    assert texts == [c.text for c in whole.completions]
    assert sorted(ends) == [0, 1]


def test_leaving_a_stream_ends_its_samples(completer, loop):
    stream = completer.stream(ids("a"), greedy(n=2, max_tokens=20))
    next(stream)
    stream.close()
    assert sorted(loop.aborted) == [r.request_id for r in loop.order] and not loop.requests


def test_a_failing_sequence_fails_alone(completer):
    outputs = completer.complete([ids("a!"), ids("a")], [greedy(), greedy()])
    assert outputs[0].completions[0].finish_reason == "error"
    assert outputs[0].completions[0].error == "planted"
    assert outputs[1].completions[0].text == "bcdef"
    with pytest.raises(DrivetrainError, match="planted"):
        list(completer.stream(ids("a!"), greedy()))


def test_a_prompt_that_is_too_long_runs_nothing(completer, loop):
    with pytest.raises(RequestError) as caught:
        completer.complete([ids("a"), ids("a" * 28)], [greedy(), greedy()])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"
    assert not loop.order


def test_what_runs_ends_when_a_later_prompt_is_refused(completer, loop, monkeypatch):
    take = loop.submit

    def refuse_second(request):
        if loop.order:
            raise RequestError("no")
        take(request)

    monkeypatch.setattr(loop, "submit", refuse_second)
    with pytest.raises(RequestError):
        completer.complete([ids("a"), ids("b")], [greedy(), greedy()])
    assert loop.aborted == [loop.order[0].request_id]


def test_vectors_come_in_the_order_of_the_prompts(completer):
    first, second = completer.pool([ids("ab"), ids("c")], PoolingParams())
    assert first.tolist() == [97.0, 98.0] and second.tolist() == [99.0]
    with pytest.raises(DrivetrainError, match="prompt 1 gave no vector: planted"):
        completer.pool([ids("a"), ids("!")], PoolingParams())


@pytest.mark.parametrize(
    "length,asked,param", [(0, 1, "prompt"), (10, None, "prompt"), (11, 1, "prompt"), (9, 2, "max_tokens")]
)
def test_budgets_that_do_not_fit(length, asked, param):
    with pytest.raises(RequestError) as caught:
        check_budget(10, length, asked)
    assert caught.value.param == param


def test_budgets_that_fit():
    assert check_budget(10, 4, None) == 6
    assert check_budget(10, 4, 6) == 6


def test_drawn_seeds_follow_the_engine_seed():
    def seeds(seed):
        fan_out, prompt = FanOut(seed), Prompt(ids=ids("a"), eos_ids=(), arrival=0.0)
        return [r.seed for _ in range(4) for r in fan_out.requests(prompt, SamplingParams(), 3)]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 4


def test_calls_may_overlap(completer, loop):
    """Two streams read in turn, a call and a pooling amid them: each gets its own, all of it."""
    one, two = completer.stream(ids("a"), greedy(max_tokens=9)), completer.stream(ids("k"), greedy(max_tokens=7))
    first, second = next(one).text, next(two).text
    assert completer.complete([ids("x")], [greedy(max_tokens=2)])[0].completions[0].text == "yz"
    assert completer.pool([ids("q")], PoolingParams())[0].tolist() == [ord("q")]
    for delta in two:
        second += delta.text
    for delta in one:
        first += delta.text
    assert (first, second) == ("bcdefghij", "lmnopqr") and not loop.requests and not loop.aborted


def test_a_stream_left_early_amid_others_ends_only_itself(completer, loop):
    one, two = completer.stream(ids("a"), greedy(max_tokens=9)), completer.stream(ids("k"), greedy(max_tokens=7))
    next(one)
    text = next(two).text
    one.close()
    assert len(loop.aborted) == 1
    assert text + "".join(d.text for d in two) == "lmnopqr"


def test_calls_from_several_threads(completer, loop):
    from concurrent.futures import ThreadPoolExecutor

    def ask(letter):
        return completer.complete([ids(letter)], [greedy(max_tokens=6)])[0].completions[0].text

    letters = [LETTERS[n % 20] for n in range(200)]
    with ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(ask, letters))
    assert texts == [LETTERS[(ord(x) - 96) :][:6] for x in letters] and not loop.requests


def test_after_close_every_call_says_so(completer, loop):
    stream = completer.stream(ids("a"), greedy(max_tokens=9))
    next(stream)
    completer.close()
    completer.close()
    for call in (
        lambda: next(stream),
        lambda: completer.complete([ids("a")], [greedy()]),
        lambda: completer.pool([ids("a")], PoolingParams()),
        lambda: next(completer.stream(ids("a"), greedy())),
    ):
        with pytest.raises(DrivetrainError, match="closed"):
            call()
