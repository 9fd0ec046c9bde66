"""``LLM``: a model in a program, without HTTP. The loop runs in this process (``inline``) or in its own (``process``).

with LLM("path/to/model") as llm:
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].completions[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from drivetrain.completing import Completer, Completion, RequestOutput
from drivetrain.config import EngineConfig
from drivetrain.errors import ConfigError, RequestError, TokenizerError
from drivetrain.params import GenerateRequest, PoolingParams, SamplingParams
from drivetrain.sched.adjusting import check_adjusts
from drivetrain.select.choose import Choice
from drivetrain.server.assembly import Delta
from drivetrain.server.text import Text

__all__ = ["LLM", "Completion", "RequestOutput"]
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
Place = Literal["process", "inline"]


class LLM:
    """One loaded model. Calls may overlap, also from several threads: one of them steps the loop for all. Close it, or
    use it in a ``with`` statement."""

    def __init__(self, model: str, *, loop: Place = "process", device: str = "auto", **settings: Any) -> None:
        """Load ``model``. ``settings`` are fields of ``EngineConfig``. DeviceError precedes every error of the model.

        ``process`` keeps torch out of this process.
        """
        if loop not in ("process", "inline"):
            raise ConfigError(f"loop is {loop!r}", fix="give 'process' or 'inline'")
        try:
            config = EngineConfig(model=model, device=device, **settings)
        except TypeError as error:
            raise ConfigError(f"LLM: {error}", fix="settings are the fields of EngineConfig") from error
        self._open(config, loop)

    def _open(self, config: EngineConfig, place: Place) -> None:
        choice, open_loop, drop = _resolve(config, place)
        try:
            from drivetrain.tokens.text import load_text

            self.config = config
            self.device = choice.name
            with ThreadPoolExecutor(1) as beside:  # the tokenizer is read while the weights are
                text = beside.submit(load_text, config)
                opened = open_loop()
                self._loop = opened[0]
                try:
                    self._text: Text = text.result()
                except BaseException:
                    self._loop.close()
                    raise
        finally:
            drop()
        self.max_model_len: int = opened[1].max_model_len
        self.vocabulary: int = opened[1].vocabulary
        self.dtype: str = opened[1].dtype
        self._completer = Completer(
            self._loop, self._text, longest=self.max_model_len, seed=config.seed, check=self._check
        )

    @classmethod
    def from_config(cls, config: EngineConfig, *, loop: Place = "process") -> Self:
        """Load what a resolved configuration names."""
        made = cls.__new__(cls)
        made._open(config, loop)
        return made

    def generate(self, prompts: Prompts, params: Params = None) -> list[RequestOutput]:
        """Complete one or several prompts, each text or token ids; answers come in the order of the prompts.

        RequestError when a prompt is too long or the parameters do not fit; a sequence that fails on the way ends
        with ``finish_reason`` ``error``.
        """
        ids = self._encode(prompts)
        return self._completer.complete(ids, _each(params, len(ids)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Answer a conversation: mappings with ``role`` and ``content``. TokenizerError without a chat template."""
        return self._completer.complete([self._text.chat(messages, options)], [params or SamplingParams()])[0]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yield the text of one prompt's samples as it comes; leaving early ends them."""
        (ids,) = self._encode([prompt] if isinstance(prompt, str) else prompt)
        return self._completer.stream(ids, params or SamplingParams())

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Yield the answer to a conversation as it comes."""
        return self._completer.stream(self._text.chat(messages, options), params or SamplingParams())

    def pooled(self, prompts: Prompts, params: PoolingParams | None = None) -> list[np.ndarray]:
        """Return one vector a prompt: float32 [hidden] of the final normed hidden states."""
        return self._completer.pool(self._encode(prompts), params or PoolingParams())

    def encode(self, text: str) -> np.ndarray:
        """Return a text's token ids, int32, with the tokens that the model wants in front."""
        return self._text.encode(text, True)

    def require_template(self) -> None:
        """Raise TokenizerError when the model has no chat template."""
        if not self._text.has_template:
            raise TokenizerError(
                f"{self.config.model} has no chat template",
                fix="give one with --chat-template FILE, or use a model that was trained to chat",
            )

    def stats(self) -> Any:
        """Return the loop's figures: waiting, running, cache use, preemptions, prefix hits."""
        self._completer.require_open()
        return self._loop.stats()

    def close(self) -> None:
        """End the loop and free the device. Safe to call again; every other call then raises DrivetrainError."""
        self._completer.close()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, request: GenerateRequest) -> None:
        if request.adjusts:
            check_adjusts(request, self.config.max_adjusted_seqs, self.vocabulary)

    def _encode(self, prompts: Prompts) -> list[np.ndarray]:
        if isinstance(prompts, str):
            return [self._text.encode(prompts, True)]
        if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
            what = "it must be text, token ids, or a list of them"
            raise RequestError(f"prompts is {prompts!r}; {what}", param="prompts")
        items: list[Any] = list(prompts)
        if items and all(isinstance(item, int | np.integer) for item in items):
            items = [items]
        return [self._text.encode(item, True) if isinstance(item, str) else self._checked(item) for item in items]

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        try:
            given = np.asarray(ids)
        except ValueError as error:
            raise RequestError(f"a prompt is {ids!r}: {error}", param="prompts") from error
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
            raise RequestError("a prompt of token ids must be a flat list of integers", param="prompts")
        if given.size and not (0 <= int(given.min()) and int(given.max()) < self.vocabulary):
            raise RequestError(f"a token id of the prompt is not in 0..{self.vocabulary - 1}", param="prompts")
        return given.astype(np.int32)


def _each(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"params is {params!r}; it must be SamplingParams, or one a prompt", param="params")
    if len(params) != count:
        raise RequestError(
            f"{len(params)} parameters for {count} prompts", fix="give one, or one a prompt", param="params"
        )
    return list(params)


def _resolve(config: EngineConfig, place: Place) -> tuple[Choice, Callable[[], tuple[Any, Any]], Callable[[], None]]:
    """Resolve the device; return it, what opens the loop, and what ends that which was begun for a loop that was never
    opened. The loop comes with what tells ``max_model_len``, ``vocabulary`` and ``dtype``."""
    if place == "process":
        from drivetrain.ahead import resolve_and_begin

        spec = resolve_and_begin(config)
        assert spec.choice is not None

        def remote() -> tuple[Any, Any]:
            from drivetrain.server.remote_loop import RemoteLoop

            loop = RemoteLoop(spec)
            return loop, loop

        return spec.choice, remote, spec.drop
    from drivetrain.ahead import resolve_and_load
    from drivetrain.launch import open_loop

    choice = resolve_and_load(config)

    def inline() -> tuple[Any, Any]:
        opened = open_loop(config, choice)
        return opened.loop, opened

    return choice, inline, lambda: None
