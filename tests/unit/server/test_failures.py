"""What is refused, how it is told, and what a client's leaving or a loop's death does."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import openai
import pytest

from drivetrain.server.app import Door
from tests.unit.server.fakes import ByteText, serving, spec

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT_PART = "messages[0].content[0].text"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.until(running.idle)


def check(answer: httpx.Response, status: int, param=None, code=None, kind="invalid_request_error") -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, code), error
    assert answer.headers["x-request-id"]
    return error["message"]


BAD = [
    (COMPLETION, {}, "prompt", None),
    (COMPLETION, {"prompt": 3}, "prompt", None),
    (COMPLETION, {"prompt": None}, "prompt", None),
    (COMPLETION, {"prompt": []}, "prompt", None),
    (COMPLETION, {"prompt": ""}, "prompt", None),
    (COMPLETION, {"prompt": [[]]}, "prompt", None),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt", None),
    (COMPLETION, {"prompt": [300]}, "prompt", None),
    (COMPLETION, {"prompt": [-1]}, "prompt", None),
    (COMPLETION, {"prompt": [2**70]}, "prompt", None),
    (COMPLETION, {"prompt": ["a"] * 1025}, "prompt", None),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens", None),
    (COMPLETION, {"prompt": "a", "max_tokens": "many"}, "max_tokens", None),
    (COMPLETION, {"prompt": "a", "max_tokens": 4096}, "max_tokens", "context_length_exceeded"),
    (COMPLETION, {"prompt": "a" * 4096}, "prompt", "context_length_exceeded"),
    (COMPLETION, {"prompt": "a", "temperature": -1}, "temperature", None),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature", None),
    (COMPLETION, {"prompt": "a", "top_p": 0}, "top_p", None),
    (COMPLETION, {"prompt": "a", "top_k": -2}, "top_k", None),
    (COMPLETION, {"prompt": "a", "top_k": 2**40}, "top_k", None),
    (COMPLETION, {"prompt": "a", "min_p": 2}, "min_p", None),
    (COMPLETION, {"prompt": "a", "n": 0}, "n", None),
    (COMPLETION, {"prompt": "a", "n": 65}, "n", None),
    (COMPLETION, {"prompt": "a", "seed": 2**64}, "seed", None),
    (COMPLETION, {"prompt": "a", "stop": ["x"] * 17}, "stop", None),
    (COMPLETION, {"prompt": "a", "stop": ["x", ""]}, "stop", None),
    (COMPLETION, {"prompt": "a", "stop": "x" * 2000}, "stop", None),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids", None),
    (COMPLETION, {"prompt": "a", "priority": 2**40}, "priority", None),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs", None),
    (COMPLETION, {"prompt": "a", "logprobs": 1, "echo": True}, "logprobs", None),
    (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of", "unsupported_parameter"),
    (COMPLETION, {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", None),
    (COMPLETION, {"prompt": "a", "frequency_penalty": "x"}, "frequency_penalty", None),
    (COMPLETION, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", None),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", None),
    (COMPLETION, {"prompt": "a", "logit_bias": {"-5": 1}}, "logit_bias", None),
    (COMPLETION, {"prompt": "a", "bad_words": [""]}, "bad_words", None),
    (COMPLETION, {"prompt": "a", "bad_words": ["x" * 300]}, "bad_words", None),
    (COMPLETION, {"prompt": "a", "bad_words": ["x"] * 200}, "bad_words", None),
    (COMPLETION, {"prompt": "a", "min_tokens": -1}, "min_tokens", None),
    (COMPLETION, {"prompt": "a", "stream_options": {}}, "stream_options", None),
    (COMPLETION, {"prompt": "REFUSE"}, "prompt", "refused"),
    (CHAT, {}, "messages", None),
    (CHAT, {"messages": []}, "messages", None),
    (CHAT, {"messages": "hello"}, "messages", None),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", None),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", None),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", None),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
        None,
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "unsupported_parameter"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", None),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", None),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    (CHAT, {"messages": HELLO, "continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": []}}, "chat_template_kwargs[...]", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "code"), BAD)
def test_a_bad_request_is_a_400_that_names_the_field(server, path, body, param, code, stream):
    given = {**body, "stream": stream}
    if "stream_options" in body:
        del given["stream"]
    message = check(server.client().post(path, json=given), 400, param, code)
    assert param is None or param.partition("[")[0] in message or code


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_no_request_is_a_400(server, body):
    answer = server.client().post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_routes_methods_types_and_sizes(server):
    client = server.client()
    check(client.get("/v1/nothing"), 404, code="not_found")
    check(client.get("/v1/models/other"), 404, "model", "model_not_found")
    check(client.post(COMPLETION, json={"prompt": "a", "model": "other"}), 404, "model", "model_not_found")
    answer = client.get(COMPLETION)
    check(answer, 405)
    assert answer.headers["allow"] == "POST"
    check(client.post(COMPLETION, content=b"prompt=a"), 415)
    check(client.post(COMPLETION, content=b"x", headers={"content-type": "text/plain"}), 415)
    long = b'{"prompt": "' + b"a" * (33 << 20) + b'"}'
    head = {"content-type": "application/json"}
    check(client.post(COMPLETION, content=long, headers=head), 413)
    check(client.post(COMPLETION, content=iter([long[: 1 << 20]] * 34), headers=head), 413)
    assert client.head("/health").status_code == 200
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json()["version"]


def test_unknown_fields_are_ignored_and_named(server):
    body = {"prompt": "SAY x", "max_tokens": 5, "user": "me", "colour": 1, 'a"\r\nb': 2}
    answer = server.client().post(COMPLETION, json=body)
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 drivetrain "unknown fields ignored: colour, a???b"'
    neutral = {"presence_penalty": 0, "logit_bias": None, "best_of": 1, "suffix": "", "top_k": -1, "stop": None}
    answer = server.client().post(COMPLETION, json={"prompt": "SAY x", **neutral})
    assert answer.status_code == 200 and "warning" not in answer.headers


def test_request_ids_come_back(server):
    client = server.client()
    assert client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 200, "a b"):
        assert client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_a_failing_request_ends_alone(server):
    check(server.client().post(COMPLETION, json={"prompt": "ERROR"}), 500, kind="server_error")
    assert "BADSUBMIT" not in check(
        server.client().post(COMPLETION, json={"prompt": "BADSUBMIT"}), 500, kind="server_error"
    )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="fake", prompt="ERROR", stream=True))
    with server.client().stream("POST", COMPLETION, json={"prompt": "ERROR", "stream": True}) as answer:
        text = answer.read().decode()
    last = text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in text
    # one failing choice of several ends the request, and the others' work
    check(
        server.client().post(COMPLETION, json={"prompt": ["ERROR", "endless"], "max_tokens": 4000}),
        500,
        kind="server_error",
    )
    server.until(server.idle)
    assert server.front.supervisor.restarts == 0


def test_chat_without_a_template_names_the_way_out():
    with serving(text=ByteText(has_template=False)) as server:
        message = check(server.client().post(CHAT, json={"messages": HELLO}), 400, "messages", "no_chat_template")
        assert "--chat-template" in message


KEY = "sésame-1"
# Other spellings of the one open path, and of paths beside it; sent as they are.
ODD_TARGETS = (
    "/health/",
    "//health",
    "/HEALTH",
    "/v1/../health",
    "/health/../metrics",
    "/health%2f..%2fmetrics",
    "/./health",
    "/health;/metrics",
    "/health%00",
    "/metrics?/health",
    "/metrics#/health",
    "http://x/metrics",
    "http://x/health/",
)


def raw_status(server, target: str) -> int:
    """The status of a GET whose target no client has tidied up."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return int(raw.makefile("rb").readline().split()[1])


def test_every_route_but_those_of_probes_needs_the_key():
    with serving(door=Door(model="fake", api_key=KEY)) as server:
        client = server.client()
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        headers = (None, "", "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}")
        for path in ("/ready/", "/metrics", "/version", "/v1/models", "/v1/models/fake", COMPLETION, CHAT, "/nothing"):
            for header in headers:
                head = {} if header is None else {"authorization": header.encode()}
                for method in ("GET", "POST", "OPTIONS"):
                    answer = client.request(method, path, headers=head)
                    check(answer, 401, code="invalid_api_key")
                    assert answer.headers["www-authenticate"] == "Bearer"
        for target in ODD_TARGETS:
            assert raw_status(server, target) in (400, 401), target
        right = {"authorization": f"Bearer {KEY}".encode()}
        assert client.get("/ready", headers=right).status_code == 200
        assert client.post(COMPLETION, headers=right, json={"prompt": "SAY x"}).status_code == 200
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            sdk.models.list()


def test_a_burst_over_the_door_is_refused_with_a_time_to_come_back():
    with serving(spec(step_seconds="0.005"), door=Door(model="fake", max_queued_requests=4)) as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "go", "max_tokens": 60}
        threads = [
            threading.Thread(target=lambda: answers.append(server.client().post(COMPLETION, json=body)))
            for _ in range(24)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        refused = [one for one in answers if one.status_code == 429]
        assert refused and all(one.status_code in (200, 429) for one in answers)
        assert sum(one.status_code == 200 for one in answers) >= 4
        for one in refused:
            check(one, 429, kind="rate_limit_error", code="too_many_requests")
            assert 1 <= int(one.headers["retry-after"]) <= 60
        server.until(server.idle)
        assert server.client().post(COMPLETION, json=body).status_code == 200


def leave_mid_stream(server, body) -> None:
    """Read one event, then close the connection."""
    with server.client().stream("POST", COMPLETION, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())


ENDLESS = {"prompt": "endless", "max_tokens": 4000}


def test_leaving_aborts_in_the_loop():
    """At 5 ms a step these sequences would run for 20 s and more; nothing but an abort ends them sooner."""
    with serving(spec(step_seconds="0.005")) as server:
        leave_mid_stream(server, ENDLESS)
        server.until(server.idle, 10)
        leave_mid_stream(server, {**ENDLESS, "n": 8})
        server.until(server.idle, 10)
        # not streaming: the client gives up before the answer
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETION, json=ENDLESS, timeout=0.3)
        server.until(server.idle, 10)
        # before the body's end
        raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"
        )
        server.until(lambda: server.metric("http_requests_held") == 1)
        raw.close()
        server.until(server.idle, 10)
        text = server.client().get("/metrics").text
        assert 'drivetrain_finished_total{reason="abort"} 10.0' in text


def test_a_hundred_clients_leave_and_the_others_do_not_notice():
    with serving(spec(step_seconds="0.002", rows="32")) as server:
        body = {"prompt": "stays", "max_tokens": 300, "seed": 3}
        expected = server.client().post(COMPLETION, json=body).json()["choices"][0]["text"]
        stays: list[str] = []
        threads = [
            threading.Thread(
                target=lambda: stays.append(server.client().post(COMPLETION, json=body).json()["choices"][0]["text"])
            )
            for _ in range(3)
        ]
        for one in threads:
            one.start()
        sockets = []
        content = json.dumps({**ENDLESS, "stream": True}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        for _ in range(100):
            raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            raw.sendall(head.encode() + content)
            sockets.append(raw)
        server.until(lambda: server.metric("requests_waiting") > 0 and server.metric("http_requests_held") >= 100)
        for raw in sockets:
            raw.close()
        for one in threads:
            one.join()
        assert stays == [expected] * 3
        server.until(server.idle)
        assert len(server.front._held) == 0


@pytest.mark.parametrize(
    ("prompt", "why"), [("CRASH", "SIGKILL"), ("RAISE", "the step broke"), ("HANG", "not answered")]
)
def test_a_lost_loop_tells_everyone_and_is_replaced(prompt, why):
    with serving(spec(step_seconds="0.005")) as server:
        outcomes: list[tuple[int, str]] = []

        def hold() -> None:
            answer = server.client().post(COMPLETION, json=ENDLESS)
            outcomes.append((answer.status_code, answer.json()["error"]["message"]))

        def hold_stream() -> None:
            with server.client().stream("POST", COMPLETION, json={**ENDLESS, "stream": True}) as answer:
                last = answer.read().decode().strip().split("\n\n")[-1]
            outcomes.append((503, json.loads(last.removeprefix("data: "))["error"]["message"]))

        threads = [threading.Thread(target=one) for one in (hold, hold, hold_stream)]
        for one in threads:
            one.start()
        server.until(lambda: server.metric("requests_running") == 3)
        answer = server.client().post(COMPLETION, json={"prompt": prompt})
        assert why in check(answer, 503, kind="server_error", code="loop_unavailable")
        assert answer.headers["retry-after"]
        for one in threads:
            one.join()
        assert [status for status, _ in outcomes] == [503] * 3
        assert all(why in message for _, message in outcomes)
        # readiness turns, and comes back with a new process that serves
        server.until(lambda: server.client().get("/ready").status_code == 200)
        assert server.idle()
        assert server.client().post(COMPLETION, json={"prompt": "SAY again"}).json()["choices"][0]["text"] == "again"
        assert server.front.supervisor.restarts == 1


def test_readiness_is_503_while_the_loop_restarts():
    with serving(spec(open_seconds="0.7")) as server:
        check(
            server.client().post(COMPLETION, json={"prompt": "CRASH"}),
            503,
            kind="server_error",
            code="loop_unavailable",
        )
        answer = server.client().get("/ready")
        message = check(answer, 503, kind="server_error", code="loop_unavailable")
        assert "restarted" in message and answer.headers["retry-after"]
        check(server.client().post(COMPLETION, json={"prompt": "a"}), 503, kind="server_error", code="loop_unavailable")
        assert server.client().get("/health").status_code == 200
        assert server.metric("ready") == 0
        server.until(lambda: server.client().get("/ready").status_code == 200)
        assert server.metric("ready") == 1


def test_a_quiet_stream_gets_pings():
    with serving(spec(step_seconds="0.3"), door=Door(model="fake", ping_seconds=0.05)) as slow:
        body = {"prompt": "SAY x", "stream": True}
        text = slow.client().post(COMPLETION, json=body).text
        assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_metrics_count_what_was_served(server):
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total")}
    server.client().post(COMPLETION, json={"prompt": "SAY abcde", "max_tokens": 50})
    assert server.metric("prompt_tokens_total") - before["prompt_tokens_total"] == 9
    assert server.metric("generated_tokens_total") - before["generated_tokens_total"] == 5
    text = server.client().get("/metrics").text
    for name in (
        "drivetrain_time_to_first_token_seconds_count",
        'drivetrain_finished_total{reason="length"}',
        "drivetrain_requests_waiting",
        "drivetrain_cache_use_ratio",
    ):
        assert name in text
