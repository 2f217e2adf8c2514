"""Client and server sides of the service in jaxllm.proto, from its descriptor: what protoc's plugin for gRPC would generate."""

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from server.grpc.jaxllm_pb2 import DESCRIPTOR

SERVICE = DESCRIPTOR.services_by_name["Inference"]


class InferenceStub:
    """The service's methods on a channel, e.g. `InferenceStub(channel).Abort(AbortRequest())`."""

    def __init__(self, channel: Any):
        for method in SERVICE.methods:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:  # for type checkers; the methods are set above
        raise AttributeError(f"{SERVICE.full_name} has no method {name}")


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Serve the service by the methods of an object that have the same names."""
    handlers = {}
    for method in SERVICE.methods:
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = kind(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
