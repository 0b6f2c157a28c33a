"""OpenAI's HTTP shapes as vLLM serves them: reads a request's body, builds the answers.

Tokens: 4 UTF-8 bytes are one token, the last one padded with spaces; a prompt may also be a list of token ids. A chat
is rendered as `<|role|>`, the content, … and `<|assistant|>` for the answer, each part padded to whole tokens, so that
a conversation that goes on starts with exactly the tokens (prompt and answer) that came before.
Ignored: sampling parameters, stop, tools. Refused, because answers would be wrong: n, best_of, echo, several prompts.
"""

import json
from array import array
from dataclasses import dataclass
from typing import Any

from service.errors import InvalidInput

DEFAULT_MAX_TOKENS = 16
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the engine needs it; `tokens` has 4 bytes a token; `model` is empty when the body names none."""

    chat: bool
    model: str
    tokens: bytes
    max_tokens: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def encode(text: str) -> bytes:
    """Return the tokens of a text, 4 bytes each."""
    # A lone surrogate is valid JSON and no valid UTF-8.
    data = text.encode("utf-8", "replace")
    return data + b" " * (-len(data) % TOKEN_BYTES)


def parse(body: bytes, chat: bool) -> Ask:
    """Return what the body of a (chat) completion request asks for; InvalidInput names the field and the remedy."""
    try:
        fields = json.loads(body)
    except ValueError as exc:
        raise InvalidInput(f"the body is not JSON ({exc})", "send one JSON object") from None
    if not isinstance(fields, dict):
        raise InvalidInput("the body is not a JSON object", "send one JSON object")
    for name, only in (("n", 1), ("best_of", 1), ("echo", False)):
        if fields.get(name) not in (None, only):
            raise InvalidInput(f"{name} = {fields[name]!r} is not simulated", f"leave {name} out")
    model = fields.get("model") or ""
    if not isinstance(model, str):
        raise InvalidInput(f"model = {model!r} is not a string", "name the model that is served, see /v1/models")
    tokens = _chat_tokens(fields.get("messages")) if chat else _prompt_tokens(fields.get("prompt"))
    if not tokens:
        raise InvalidInput("the prompt is empty", "send at least one token")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidInput("stream_options is not an object", 'send {"include_usage": true} or leave it out')
    return Ask(
        chat=chat,
        model=model,
        tokens=tokens,
        max_tokens=_max_tokens(fields),
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


def _max_tokens(fields: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{name} = {value!r}", "send a whole number of at least 1")
        return value
    return DEFAULT_MAX_TOKENS


def _prompt_tokens(prompt: object) -> bytes:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        try:
            return array("I", prompt).tobytes()
        except OverflowError:
            raise InvalidInput("prompt holds a token id outside 0 to 2**32 - 1", "send valid token ids") from None
    raise InvalidInput("prompt is not one string or one list of token ids", "send one prompt a request")


def _chat_tokens(messages: object) -> bytes:
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("messages is not a list with at least one message", "send the conversation so far")
    parts: list[bytes] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"messages[{index}] has no role", "send objects with role and content")
        parts += (encode(f"<|{message['role']}|>"), encode(_content_text(message.get("content"), index)))
    parts.append(encode("<|assistant|>"))
    return b"".join(parts)


def _content_text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    raise InvalidInput(f"messages[{index}].content is neither text nor a list of text parts", "send text only")


class Answer:
    """Builds the documents of one answer: whole, or chunk by chunk as server-sent events."""

    __slots__ = ("_chat", "_head", "_usage_always")

    def __init__(self, ask: Ask, request_id: str, model: str, created_s: int, fingerprint: str) -> None:
        self._chat = ask.chat
        self._usage_always = ask.include_usage
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{request_id}",
            "object": "",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, text: str, usage: Usage) -> dict[str, Any]:
        """Return the one document of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        else:
            choice["text"] = text
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": [choice], "usage": usage.as_json()}

    def chunk(self, text: str, first: bool, last: bool) -> bytes:
        """Return one event with more text; the first names the role, the last the reason to finish."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length" if last else None}
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        document = {**self._head, "object": self._chunk_name, "choices": [choice]}
        if self._usage_always:
            document["usage"] = None
        return _event(document)

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event after the last text, for `stream_options.include_usage`."""
        return _event({**self._head, "object": self._chunk_name, "choices": [], "usage": usage.as_json()})

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"


DONE = b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def error_document(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object as vLLM fills it."""
    kind = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError"}.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def models_document(model: str, created_s: int, max_model_len: int) -> dict[str, Any]:
    """Return the answer of /v1/models."""
    return {"object": "list", "data": [model_document(model, created_s, max_model_len)]}


def model_document(model: str, created_s: int, max_model_len: int) -> dict[str, Any]:
    """Return the answer of /v1/models/NAME."""
    return {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
