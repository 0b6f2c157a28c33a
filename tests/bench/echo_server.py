"""The least that a Python external processor can do: grpc.aio, each message decoded, a fixed reply a kind of message.

`python echo_server.py PORT [--destination IP:PORT] [--uvloop]`; it serves until it is killed. With a destination it
answers request headers as a processor that picked that endpoint would; without, it lets everything pass unchanged.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator

import grpc
import uvloop

from service.pb import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
KINDS = ("request_headers", "response_headers", "request_trailers", "response_trailers")


def replies(destination: str) -> dict[str, bytes]:
    """Return the reply to each kind of message."""
    fixed = {}
    for kind in KINDS:
        reply = pb.ProcessingResponse()
        getattr(reply, kind).SetInParent()  # an empty one would be dropped as spurious
        if kind == "request_headers" and destination:
            option = reply.request_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = DESTINATION, destination.encode()
            fields = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
            fields[DESTINATION].string_value = destination
        fixed[kind] = reply.SerializeToString()
    return fixed


async def serve(port: int, destination: str) -> None:
    """Serve on 127.0.0.1 until killed."""
    fixed = replies(destination)

    async def process(requests: AsyncIterator[pb.ProcessingRequest], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield fixed[request.WhichOneof("request")]

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(
        process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--destination", default="")
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()
    loop_factory = uvloop.new_event_loop if arguments.uvloop else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(arguments.port, arguments.destination))


if __name__ == "__main__":
    main()
