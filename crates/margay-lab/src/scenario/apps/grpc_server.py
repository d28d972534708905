# A gRPC server without generated code: one call, and one that streams both ways.
import concurrent.futures
import os

import grpc


def upper(request, context):
    return request.upper()


def echo(requests, context):
    yield from requests


def take(value):
    return value


handlers = {
    "Upper": grpc.unary_unary_rpc_method_handler(upper, take, take),
    "Echo": grpc.stream_stream_rpc_method_handler(echo, take, take),
}
server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=8))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("lab.Words", handlers)])
server.add_insecure_port("0.0.0.0:" + os.environ["PORT"])
server.start()
server.wait_for_termination()
