"""Follows a service's EndpointSlices on the Kubernetes API server: list once, then watch.

1. A list gives everything and a resource version; a watch from that version gives each change after it.
2. A watch ends in order after WATCH_S, and is opened again from the version of the last event or bookmark. That bounds
   for how long a connection that died unnoticed is believed.
3. A version that is too old (410, as a status or as an event) leads to a new list, as does what cannot be read.
4. A connection that breaks is opened again from the last version, after a pause.
5. 401 makes a new client with the credentials as they are then; the token of a pod is read again each minute anyway.

Credentials: KUBECONFIG, else the pod's service account, else ~/.kube/config. The package is an extra of its own; its
objects are not used, only its credentials and its connection.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError
from kubernetes_asyncio.client import ApiClient, Configuration, DiscoveryV1Api
from kubernetes_asyncio.config import load_incluster_config, load_kube_config

from service.discovery.sighting import Sighting
from service.discovery.slices import read_slices
from service.errors import DiscoveryFailed, InvalidInput
from service.settings import ServiceSettings, parse_discover

WATCH_S = 60.0
LIST_TIMEOUT_S = 10.0
# A server that ends watches sooner than this, without an event, is not to be asked again at once.
SHORT_S = 1.0
GONE = 410

KUBECONFIG = "KUBECONFIG"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
HOME_CONFIG = "~/.kube/config"
SERVER_REMEDY = "check that the API server can be reached from here; the last fleet stays until then"


class ApiServer:
    """The slices of one service."""

    def __init__(self, settings: ServiceSettings) -> None:
        """settings: `discover` is of the source k8s.  Raise InvalidInput when there are no credentials to be had."""
        _, service, self._port = parse_discover(settings.discover)
        self._namespace, _, self._service = service.partition("/")
        if not (os.environ.get(KUBECONFIG) or os.environ.get(IN_CLUSTER) or Path(HOME_CONFIG).expanduser().is_file()):
            raise InvalidInput(
                f"--discover {settings.discover}: this is no Kubernetes pod, and no KUBECONFIG is set",
                "run it in the cluster, or set KUBECONFIG to a file",
            )
        self._client: ApiClient | None = None
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""
        self._listed_s = self._opened_s = 0.0
        self._stream: aiohttp.ClientResponse | None = None

    async def find(self) -> Sighting:
        """List; raise DiscoveryFailed."""
        self._end_stream()
        self._version = ""
        response = await self._request(LIST_TIMEOUT_S)
        try:
            listed = json.loads(await response.read())
            self._slices = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
            self._version = str(listed["metadata"]["resourceVersion"])
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._broken(exc) from exc
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise DiscoveryFailed("malformed", f"the list cannot be read: {exc}", SERVER_REMEDY) from exc
        finally:
            response.release()
        self._listed_s = time.monotonic()
        return self._sighting()

    async def wait(self) -> Sighting:
        """Watch until something has changed, list where that cannot be; raise DiscoveryFailed."""
        while self._version:
            if self._stream is None:
                self._stream = await self._open()
                if self._stream is None:
                    break
            line = await self._next_line(self._stream)
            if not line:
                self._end_stream()
                if time.monotonic() - self._opened_s < SHORT_S:
                    raise DiscoveryFailed("connection", "the API server ended a watch at once", SERVER_REMEDY)
            elif self._take(line):
                return self._sighting()
        return await self.find()

    async def close(self) -> None:
        """End the watch and the connection."""
        self._end_stream()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _forget_version(self) -> None:
        """Make the next step a list; raise DiscoveryFailed when the version is younger than it may be for that."""
        self._version = ""
        if time.monotonic() - self._listed_s < SHORT_S:
            raise DiscoveryFailed("gone", "the API server has forgotten the version that it just told", SERVER_REMEDY)

    def _sighting(self) -> Sighting:
        found, skipped = read_slices(self._slices.values(), self._port)
        return Sighting(tuple(found), tuple(skipped))

    def _take(self, line: bytes) -> bool:
        """Take an event in; return whether slices have changed. Without a version afterwards, list again."""
        try:
            event = json.loads(line)
            kind, thing = event["type"], event["object"]
            if kind == "ERROR" and thing.get("code") == GONE:
                self._forget_version()
                return False
            if kind == "ERROR":
                self._version = ""
                what = f"the API server ended the watch: {thing.get('message')}"
                raise DiscoveryFailed("status", what, SERVER_REMEDY)
            name, version = thing["metadata"].get("name"), str(thing["metadata"]["resourceVersion"])
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise self._unreadable(exc) from exc
        self._version = version
        if kind in {"ADDED", "MODIFIED"}:
            self._slices[name] = thing
        elif kind == "DELETED":
            self._slices.pop(name, None)
        else:
            return False
        return True

    async def _open(self) -> aiohttp.ClientResponse | None:
        """Start a watch; return None when its version is gone."""
        # Not all of a rollout's processes in one second.
        ends_s = WATCH_S * random.uniform(1.0, 1.5)
        self._opened_s = time.monotonic()
        try:
            return await self._request(
                ends_s + LIST_TIMEOUT_S,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=self._version,
                timeout_seconds=max(1, round(ends_s)),
            )
        except DiscoveryFailed as exc:
            if exc.cause != "gone":
                raise
            self._forget_version()
            return None

    async def _next_line(self, stream: aiohttp.ClientResponse) -> bytes:
        try:
            return await stream.content.readline()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            self._end_stream()
            raise self._broken(exc) from exc
        except (HttpProcessingError, ValueError) as exc:  # A line of more megabytes than a slice can have.
            raise self._unreadable(exc) from exc

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _request(self, timeout_s: float, **asked: object) -> aiohttp.ClientResponse:
        """Return the response to a list or watch, whose body is not read; raise DiscoveryFailed."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                if self._client is None:
                    self._client = await _new_client()
                response: aiohttp.ClientResponse = await DiscoveryV1Api(self._client).list_namespaced_endpoint_slice(
                    self._namespace,
                    label_selector=f"kubernetes.io/service-name={self._service}",
                    _preload_content=False,
                    _request_timeout=aiohttp.ClientTimeout(total=timeout_s),
                    **asked,
                )
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as exc:
            raise self._broken(exc) from exc
        except (OSError, ValueError) as exc:
            raise _unusable(exc) from exc
        if response.status != 200:
            said = (await _text(response))[:200]
            response.release()
            raise await self._refused(response.status, said)
        return response

    async def _refused(self, status: int, said: str) -> DiscoveryFailed:
        what = f"the API server answers {status}: {said}"
        match status:
            case 401:
                await self.close()
                return DiscoveryFailed("unauthorized", what, "renew the credentials; they are read again for each try")
            case 403:
                rule = (
                    f"apiGroups discovery.k8s.io, resources endpointslices, verbs get, list, watch in {self._namespace}"
                )
                return DiscoveryFailed("forbidden", what, f"give the service account a Role with the rule: {rule}")
            case 410:
                return DiscoveryFailed("gone", what, SERVER_REMEDY)
            case _:
                return DiscoveryFailed("status", what, SERVER_REMEDY)

    def _unreadable(self, exc: Exception) -> DiscoveryFailed:
        """End a watch that no longer makes sense, so that a list follows."""
        self._version = ""
        self._end_stream()
        return DiscoveryFailed("malformed", f"an event of the watch cannot be read: {exc}", SERVER_REMEDY)

    def _broken(self, exc: Exception) -> DiscoveryFailed:
        return DiscoveryFailed("connection", f"API server: {type(exc).__name__}: {exc}", SERVER_REMEDY)


async def _text(response: aiohttp.ClientResponse) -> str:
    try:
        text = await response.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""
    try:
        return str(json.loads(text)["message"])
    except (KeyError, TypeError, ValueError):
        return text.strip()


async def _new_client() -> ApiClient:
    configuration = Configuration()
    try:
        if not os.environ.get(KUBECONFIG) and os.environ.get(IN_CLUSTER):
            load_incluster_config(client_configuration=configuration)
        else:
            path = os.environ.get(KUBECONFIG) or HOME_CONFIG
            await load_kube_config(config_file=path, client_configuration=configuration)
        return ApiClient(configuration)
    except Exception as exc:  # Whatever a file of somebody's makes the package raise: there is no list of it.
        raise _unusable(exc) from exc


def _unusable(exc: Exception) -> DiscoveryFailed:
    what = f"the credentials for the API server cannot be used: {type(exc).__name__}: {exc}"
    return DiscoveryFailed("credentials", what, "correct KUBECONFIG, or mount the service account's token")
