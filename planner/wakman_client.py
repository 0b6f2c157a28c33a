"""Asks one vLLM server for what `/v1/wakman` says, with the standard library alone.

1. A redirect is no answer: the key would follow it to another host.
2. Every fault becomes one sentence and an exit code: 5 it cannot be reached or its engine does not answer, 3 it
   refused (no such route, a wrong key, an unknown policy, an engine that is not attached).
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

from service.errors import InvalidInput

TIMEOUT_S = 15.0
MAX_BYTES = 16_000_000
REFUSED, UNREACHABLE = 3, 5


@dataclass
class Answer:
    """What a server said. error: empty, or why not; exit_code: the command's.  engines: as the server lists them."""

    engines: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    exit_code: int = 0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def base_of(url: str) -> str:
    """Return a server's URL without a slash at its end; InvalidInput when it is none."""
    base = url.strip() if "://" in url else f"http://{url.strip()}"
    base = base.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.username or parts.query or parts.fragment or not base.isascii() or " " in base:
        # A password before the @ is not repeated.
        raise InvalidInput(f"--url {url.rpartition('@')[2][:80]!r} is no server's", "write it as http://host:8000")
    return base


def ask(base: str, what: str, api_key: str | None, order: dict[str, str] | None = None) -> Answer:
    """Return what `base` says to `GET`, or with an order `POST`, `/v1/wakman/{what}`; waits `TIMEOUT_S` at most."""
    headers = {"Accept": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    body = None
    if order is not None:
        body, headers["Content-Type"] = json.dumps(order).encode(), "application/json"
    try:
        request = urllib.request.Request(f"{base}/v1/wakman/{what}", data=body, headers=headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as response:
            return _read(response.status, response.read(MAX_BYTES))
    except urllib.error.HTTPError as exc:
        with exc:
            return _read(exc.code, exc.read(MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as exc:
        cause = getattr(exc, "reason", None) or exc
        return Answer(error=f"cannot be reached ({cause or type(exc).__name__})", exit_code=UNREACHABLE)


def _read(code: int, body: bytes) -> Answer:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    found = document if isinstance(document, dict) else {}
    listed = found.get("engines")
    engines = [engine for engine in listed if isinstance(engine, dict)] if isinstance(listed, list) else []
    said = found.get("error")
    if code == 200 and isinstance(listed, list):
        return Answer(engines)
    if code == 200:
        return Answer(error="answers, but not as the engine patch does; is it a vLLM server?", exit_code=REFUSED)
    if code in {401, 403}:
        return Answer(error="refuses the key; give --api-key or CACHEROUTE_ENGINE_API_KEY", exit_code=REFUSED)
    if code == 404:
        return Answer(
            error="has no /v1/wakman; start vLLM with VLLM_PLUGINS=wakman and this package installed", exit_code=REFUSED
        )
    if code >= 500:
        return Answer(engines, error=str(said or f"answers {code}"), exit_code=UNREACHABLE)
    return Answer(engines, error=str(said or f"answers {code}"), exit_code=REFUSED)
