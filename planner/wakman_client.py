"""Asks one vLLM server for what `/v1/wakman` says, with the standard library alone.

1. A redirect is no answer: the key would follow it to another host.
2. Every fault becomes one sentence and an exit code: 5 it cannot be reached or its engine does not answer, 3 it
   refused (no such route, a wrong key, an unknown policy, an engine that is not attached).
3. Of an order it is said whether it may have arrived: not where no connection came about, nor where it was refused.
"""

import http.client
import json
import re
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
    """What a server said. error: empty, or why not; exit_code: the command's.  engines: as the server lists them.

    unknown: whether an engine that is not listed may have got what it was asked, without an answer that says so.
    """

    engines: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    exit_code: int = 0
    unknown: bool = False


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
    """Return a server's URL, without a slash at its end and what follows `/v1`; InvalidInput when it is none."""
    base = url.strip() if "://" in url else f"http://{url.strip()}"
    base = re.sub(r"/v1(/wakman(/\w*)?)?$", "", base.rstrip("/"))
    try:
        parts = urlsplit(base)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
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
        try:
            with exc:
                return _read(exc.code, exc.read(MAX_BYTES), exc.headers.get("Location") or "", keyed=bool(api_key))
        except (OSError, http.client.HTTPException) as cut:
            return Answer(
                error=f"answers {exc.code} and breaks off ({_words(cut)})", exit_code=UNREACHABLE, unknown=True
            )
    except urllib.error.URLError as exc:
        # It wraps what happens up to the end of sending; the order is sent last.
        return Answer(error=f"cannot be reached ({_words(exc.reason)})", exit_code=UNREACHABLE)
    except TimeoutError:
        return Answer(error=f"did not answer within {TIMEOUT_S:g} s", exit_code=UNREACHABLE, unknown=True)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return Answer(error=f"does not answer ({_words(exc)})", exit_code=UNREACHABLE, unknown=True)


def _words(cause: object) -> str:
    """Return what happened without the number of the error."""
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def _read(code: int, body: bytes, location: str = "", *, keyed: bool = False) -> Answer:
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
    if code == 401:
        how = "refuses the key that it was given" if keyed else "wants a key"
        return Answer(error=f"{how}; give its own by --api-key or CACHEROUTE_ENGINE_API_KEY", exit_code=REFUSED)
    if code == 403:
        return Answer(error="is shut off by what stands before it (403, never vLLM's own answer)", exit_code=REFUSED)
    if code == 404:
        remedy = "start vLLM (0.26 or later) with VLLM_PLUGINS=wakman and this package installed"
        return Answer(error=f"has no /v1/wakman; {remedy}, or steer by WAKMAN_CONTROL_FILE", exit_code=REFUSED)
    if location:
        return Answer(
            error=f"answers {code}, a redirect that is not followed; name {location[:200]}", exit_code=REFUSED
        )
    if code >= 500:
        return Answer(engines, str(said or f"answers {code}"), UNREACHABLE, unknown=True)
    return Answer(engines, error=str(said or f"answers {code}"), exit_code=REFUSED)
