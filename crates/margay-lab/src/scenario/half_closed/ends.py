# Both ends of connections whose client closes its direction first.
#
#   ends.py serve PORT...       echoes dots; at a client's end of data says "asked PORT", and writes and closes when
#   told ends.py ask ADDRESS PORT    dots, until it is told; then a request and the end of data; then what the answer
#   was (JSON)
#
# SIGUSR1 tells.
import json
import signal
import socket
import sys
import threading

ANSWER = bytes(number % 251 for number in range(20_000))
TOLD = threading.Event()
LIMIT_S = 60


def say(text):
    print(text, flush=True)


def serve_one(stream, port):
    with stream:
        while data := stream.recv(4096):
            stream.sendall(b"." * data.count(b"."))
        say(f"asked {port}")
        TOLD.wait()
        stream.sendall(ANSWER)
    say(f"closed {port}")


def serve(port):
    listener = socket.create_server(("0.0.0.0", port))
    say(f"listens {port}")
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=serve_one, args=(stream, port)).start()


def ask(address, port):
    with socket.create_connection((address, port), LIMIT_S) as stream:
        stream.settimeout(LIMIT_S)
        say("connected")
        while not TOLD.wait(0.05):
            stream.sendall(b".")
            stream.recv(1)
        stream.sendall(b"?" * 100)
        stream.shutdown(socket.SHUT_WR)
        say("asked")
        answer = b""
        while data := stream.recv(65536):
            answer += data
    return answer


signal.signal(signal.SIGUSR1, lambda *_: TOLD.set())
if sys.argv[1] == "serve":
    for port in sys.argv[2:]:
        threading.Thread(target=serve, args=(int(port),)).start()
else:
    try:
        answer = ask(sys.argv[2], int(sys.argv[3]))
        say(json.dumps({"bytes": len(answer), "right": answer == ANSWER}))
    except OSError as error:
        say(json.dumps({"right": False, "error": str(error)}))
