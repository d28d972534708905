"""Serves a name: says back what it hears. Run: python3 echo_server.py echo.shop"""

import sys
import threading

import margay


def echo(conn: margay.Socket, peer: margay.Peer) -> None:
    with conn:
        while data := conn.recv(65536):
            conn.sendall(data)
    print(f"{peer} is gone", flush=True)


with margay.listen(sys.argv[1]) as listener:
    print(f"serving {sys.argv[1]}", flush=True)
    while True:
        threading.Thread(target=echo, args=listener.accept()).start()
