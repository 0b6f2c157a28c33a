"""The official `openai` client, and plain HTTP, against a real `cacheroute sim-engine` process."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

COMMAND = (sys.executable, "-m", "planner.cli", "sim-engine", "--listen", "127.0.0.1:0")
PROMPT = "the cat and the dog " * 60  # 300 tokens of 4 bytes
DEADLINE_S = 30.0


@dataclass
class Engine:
    """A running engine and what its clients need."""

    process: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample, whichever other labels it has."""
        for line in get(f"{self.url}/metrics").splitlines():
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no sample {name} {labels}")

    def reach(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value."""
        end = time.monotonic() + DEADLINE_S
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < end, f"{name} stays at {found}, not {value}"
            time.sleep(0.01)


@contextlib.contextmanager
def running(*options: str) -> Iterator[Engine]:
    """Run an engine on a free port; it is gone afterwards."""
    with subprocess.Popen((*COMMAND, *options), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("{"), line + process.stderr.read()
            yield Engine(process, f"http://{json.loads(line)['address']}")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running("--speed", "50", "--model", "m") as started:
        yield started


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def post(url: str, body: bytes) -> tuple[int, dict[str, object]]:
    """Return status and JSON of a POST, whatever the status."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, json.loads(fault.read())


def test_lists_its_model(engine: Engine) -> None:
    """models.list and models.retrieve name the model that is served."""
    with engine.client() as client:
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").owned_by == "vllm"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_chat_and_completion_generate_exactly_max_tokens(engine: Engine) -> None:
    """Whole answers have max_tokens tokens of 4 bytes, 16 when not told, end by length, and add up in `usage`."""
    with engine.client() as client:
        chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=7)
        assert chat.choices[0].message.role == "assistant"
        assert len(chat.choices[0].message.content or "") == 28
        assert chat.choices[0].finish_reason == "length"
        assert chat.system_fingerprint
        assert chat.usage is not None
        assert (chat.usage.completion_tokens, chat.usage.total_tokens) == (7, chat.usage.prompt_tokens + 7)
        text = client.completions.create(model="m", prompt="hello")
        assert len(text.choices[0].text) == 64
        assert text.usage is not None
        assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (2, 16)
        newer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
        )
        assert newer.usage is not None
        assert newer.usage.completion_tokens == 3


def test_streams_say_what_whole_answers_say(engine: Engine) -> None:
    """Chunks add up to the text of the same request without streaming; the last ones carry reason and usage."""
    with engine.client() as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "stream me"}]
        whole = client.chat.completions.create(model="m", messages=messages, max_tokens=60)
        chunks = list(
            client.chat.completions.create(
                model="m", messages=messages, max_tokens=60, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 60
        assert len({c.id for c in chunks}) == 1
        text = client.completions.create(model="m", prompt="stream me", max_tokens=60)
        parts = list(client.completions.create(model="m", prompt="stream me", max_tokens=60, stream=True))
        assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
        assert parts[-1].choices[0].finish_reason == "length"
        assert all(part.usage is None for part in parts)


async def test_the_asynchronous_client_streams_side_by_side(engine: Engine) -> None:
    """Requests of an AsyncOpenAI client run together and each gets its own whole answer."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"number {number}"}], max_tokens=40, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=DEADLINE_S) as client:
        texts = await asyncio.gather(*(ask(client, number) for number in range(20)))
    assert all(len(text) == 160 for text in texts)
    assert len(set(texts)) == 20


def test_usage_and_metrics_agree_on_cached_tokens(engine: Engine) -> None:
    """What answers report as cached, prompt and generated tokens is what the counters grew by; a reset makes it 0."""
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total")
    before = [engine.metric(f"vllm:{name}", model_name="m", engine="0") for name in names]
    with engine.client() as client:
        usages = [client.completions.create(model="m", prompt=f"{PROMPT}{n}", max_tokens=5).usage for n in (1, 2, 3, 3)]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    cached = [detail.cached_tokens for detail in details if detail is not None]
    # 300 shared tokens are 18 full blocks of 16.
    assert cached == [0, 288, 288, 288]
    after = [engine.metric(f"vllm:{name}", model_name="m", engine="0") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4 * 301, 3 * 288, 4 * 301, 4 * 5]
    status, _ = post(f"{engine.url}/reset_prefix_cache", b"")
    assert status == 200
    with engine.client() as client:
        cold = client.completions.create(model="m", prompt=f"{PROMPT}1", max_tokens=5).usage
    assert cold is not None
    assert cold.prompt_tokens_details is not None
    assert cold.prompt_tokens_details.cached_tokens == 0


def test_the_next_turn_of_a_chat_hits_prompt_and_answer(engine: Engine) -> None:
    """A conversation that goes on is cached up to the last full block, the model's own answer included."""
    with engine.client() as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
        first = client.chat.completions.create(model="m", messages=messages, max_tokens=100)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "go on"},
        ]
        second = client.chat.completions.create(model="m", messages=messages, max_tokens=1)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    computed = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == computed // 16 * 16


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", b"{", 400, "not JSON"),
        ("completions", b"[]", 400, "not a JSON object"),
        ("completions", b'{"prompt": ""}', 400, "empty"),
        ("completions", b'{"prompt": ["a", "b"]}', 400, "one prompt a request"),
        ("completions", b'{"prompt": [-1]}', 400, "token id"),
        ("completions", b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens = 0"),
        ("completions", b'{"prompt": "a", "n": 2}', 400, "n = 2"),
        ("completions", b'{"prompt": "a", "max_tokens": 200000}', 400, "maximum context length"),
        ("completions", b'{"prompt": "a", "model": "gpt-4"}', 404, "`gpt-4` does not exist"),
        ("chat/completions", b'{"messages": []}', 400, "at least one message"),
        ("chat/completions", b'{"messages": [{"content": "a"}]}', 400, "messages[0] has no role"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', 400, "text only"),
        ("nowhere", b"{}", 404, "Not Found"),
    ],
)
def test_errors_come_as_openai_sends_them(engine: Engine, path: str, body: bytes, status: int, words: str) -> None:
    """A bad request is answered by its status and an `error` object that names the fault."""
    found, document = post(f"{engine.url}/v1/{path}", body)
    error = document["error"]
    assert isinstance(error, dict)
    assert found == error["code"] == status
    assert words in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


def test_prompts_of_megabytes_token_ids_and_content_parts(engine: Engine) -> None:
    """A prompt may be long text, token ids, or a list of text parts."""
    with engine.client() as client:
        long = client.completions.create(model="m", prompt="word" * 100_000, max_tokens=1)
        assert long.usage is not None
        assert long.usage.prompt_tokens == 100_000
        ids = client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=1)
        assert ids.usage is not None
        assert ids.usage.prompt_tokens == 3
        parts = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "word"}]}], max_tokens=1
        )
        plain = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word"}], max_tokens=1)
        assert parts.usage is not None
        assert plain.usage is not None
        assert parts.usage.prompt_tokens == plain.usage.prompt_tokens


def test_metrics_have_vllms_names_and_labels(engine: Engine) -> None:
    """Dashboards and routers that read vLLM's gauges, histograms and cache configuration find them."""
    with engine.client() as client:
        client.completions.create(model="m", prompt="a", max_tokens=2)
    text = get(f"{engine.url}/metrics")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f'vllm:{name}{{engine="0",model_name="m"}} 0.0' in text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert engine.metric(f"vllm:{name}_count") == engine.metric(
            "vllm:request_success_total", finished_reason="length"
        )
    assert engine.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="40071") == 1
    assert engine.metric("cacheroute_sim_info", preset="70b-fp8-tp2", speed="50") == 1


def test_health_and_version(engine: Engine) -> None:
    """Probes get 200."""
    assert get(f"{engine.url}/health") == ""
    assert "version" in json.loads(get(f"{engine.url}/version"))


def test_a_client_that_hangs_up_frees_its_request() -> None:
    """Abandoned streams and whole answers leave the batch and give back their blocks, and count as aborted."""
    # At this speed the answers would take hours: only an abort ends them in time.
    with running("--speed", "0.5", "--model", "m") as engine, engine.client() as client:
        stream = client.completions.create(model="m", prompt=PROMPT, max_tokens=100_000, stream=True)
        assert next(iter(stream)).choices[0].text
        assert engine.metric("vllm:num_requests_running") == 1
        assert engine.metric("vllm:kv_cache_usage_perc") > 0
        stream.close()
        engine.reach("vllm:num_requests_running", 0)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(model="m", prompt=PROMPT, max_tokens=100_000)
        engine.reach("vllm:request_success_total", 2, finished_reason="abort")
        engine.reach("vllm:num_requests_running", 0)
        assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_sigterm_lets_requests_in_flight_end() -> None:
    """After SIGTERM a running stream still gets its last chunk, nobody new gets in, and the exit code is 0."""
    with running("--model", "m", "--drain-s", "20") as engine, engine.client() as client:
        stream = iter(client.completions.create(model="m", prompt="a", max_tokens=60, stream=True))
        chunks = [next(stream)]
        engine.process.send_signal(signal.SIGTERM)
        host, port = engine.url.removeprefix("http://").split(":")
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                break
            assert time.monotonic() < end, "still accepts connections"
        chunks += stream
        assert "".join(chunk.choices[0].text for chunk in chunks).count(" ") == 60
        assert chunks[-1].choices[0].finish_reason == "length"
        assert engine.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--speed", "0"), "--speed 0"),
        (("--kv-blocks", "0", "--stream-interval-s", "0"), "--kv-blocks 0"),
        (("--preset", "405b"), "use one of: 70b-fp8-tp2"),
        (("--listen", "nowhere"), "'nowhere' is not HOST:PORT"),
    ],
)
def test_bad_options_are_one_clear_line(options: tuple[str, ...], words: str) -> None:
    """An option that cannot be used ends the command with code 2 and a line that names it."""
    done = subprocess.run((*COMMAND, *options), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_clear_line(engine: Engine) -> None:
    """An address that somebody listens on ends the command with code 2 and a line that names it."""
    address = engine.url.removeprefix("http://")
    done = subprocess.run((*COMMAND[:-1], address), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"cacheroute: --listen {address}: the port is in use; stop what listens there or choose another address\n"
    )
