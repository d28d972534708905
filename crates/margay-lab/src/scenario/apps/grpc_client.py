# Calls the server by the service's name: once, and with a stream of a thousand messages and answers.
import os

import grpc

name, port, word = (os.environ[key] for key in ("NAME", "PORT", "WORD"))
with open(os.environ["PAYLOAD"], "rb") as file:
    payload = file.read(1_000_000)
pieces = [payload[at : at + 1000] for at in range(0, len(payload), 1000)]
with grpc.insecure_channel(f"{name}:{port}") as channel:
    answer = channel.unary_unary("/lab.Words/Upper")(word.encode(), timeout=20)
    assert answer == word.upper().encode(), answer
    back = list(channel.stream_stream("/lab.Words/Echo")(iter(pieces), timeout=60))
    assert back == pieces, f"{len(back)} of {len(pieces)} messages came back as they were"
print(f"{answer.decode().lower()}: {len(back)} messages streamed")
