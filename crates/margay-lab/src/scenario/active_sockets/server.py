"""Answers every request with its host's name. SIGUSR1: stop listening and live on. SIGUSR2: become another program, without the
socket. --storm N: before that, make N listening sockets and close them again."""
import os
import signal
import socket
import sys

port, name = int(sys.argv[1]), sys.argv[2]
for _ in range(int(sys.argv[4]) if sys.argv[3:4] == ["--storm"] else 0):
    passing = socket.socket()
    passing.bind(("", 0))
    passing.listen()
    passing.close()
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(("0.0.0.0", port))


def stop_listening(*_):
    server.close()
    while True:
        signal.pause()


signal.signal(signal.SIGUSR1, stop_listening)
signal.signal(signal.SIGUSR2, lambda *_: os.execvp("sleep", ["sleep", "1000"]))
server.listen(128)
while True:
    connection, _ = server.accept()
    try:
        connection.settimeout(5)
        connection.recv(1024)
        connection.sendall(f"HTTP/1.0 200 OK\r\n\r\n{name}\n".encode())
    except OSError:
        pass
    connection.close()
