"""Serves Envoy's external processing streams over gRPC; the only file that knows the transport.

1. A message is answered before the next one is read: nothing piles up here, gRPC's flow control holds the sender.
2. However a stream ends, what its request holds is taken back once.
3. A stream is never ended with an error. Whatever goes wrong here, it is closed as if all were said, and Envoy goes on
   by itself at once; with an error it would do so only where it is told to fail open.
4. At most `streams_max` are open: further ones are closed unanswered, which Envoy takes the same way.
"""

import traceback
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from service.answers import Answers, Stream
from service.pb import ext_proc_pb2 as pb
from service.telemetry import Seldom, Telemetry

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExternalProcessor:
    """The method `Process`."""

    def __init__(self, answers: Answers, telemetry: Telemetry, streams_max: int = 20_000) -> None:
        """streams_max: open at a time."""
        self._answers, self._telemetry, self._streams_max = answers, telemetry, streams_max
        self._seldom = Seldom()

    def rpc(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server; messages are bytes, both ways."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(self.process)}
        )

    async def process(self, _requests: object, context: Any) -> None:
        """Serve one stream; context: of grpc.aio, of which `read` and `write` are used."""
        telemetry, stream = self._telemetry, Stream()
        telemetry.streams += 1
        try:
            try:
                if telemetry.streams > self._streams_max:
                    self._refuse_stream()
                    return
                while not stream.over:
                    message = await context.read()
                    if message is grpc.aio.EOF:
                        break
                    for reply in self._answers.answer(stream, pb.ProcessingRequest.FromString(message)):
                        await context.write(reply)
            finally:
                telemetry.streams -= 1
                self._answers.end(stream)
        except grpc.aio.BaseError:
            pass  # The peer is gone, or the server stops: no fault of ours.
        except DecodeError:
            telemetry.malformed.inc()
            if self._seldom.may("malformed"):
                log.warning(
                    "a message is no ProcessingRequest, its stream was closed",
                    remedy="see who dials this port, and whether the gateway forwards metadata that is not UTF-8",
                )
        except Exception as exc:
            telemetry.faults.inc()
            if self._seldom.may("fault"):
                # Neither the message nor the variables of the frames: a key may stand in them.
                trace = "".join(traceback.format_tb(exc.__traceback__))
                log.error(
                    "a fault of ours, the stream was closed and Envoy goes on", error=type(exc).__name__, trace=trace
                )

    def _refuse_stream(self) -> None:
        self._telemetry.streams_refused.inc()
        if self._seldom.may("streams_max"):
            log.warning(
                "streams are closed unanswered, Envoy balances those requests by itself",
                streams_max=self._streams_max,
                remedy="run more workers or processes, or raise CACHEROUTE_STREAMS_MAX",
            )
