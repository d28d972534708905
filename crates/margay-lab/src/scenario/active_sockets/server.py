"""Answers every request with its host's name.

SIGUSR1: stop listening and live on. SIGUSR2: become another program, without the socket.
"""
import argparse
import os
import signal
import socket

arguments = argparse.ArgumentParser()
arguments.add_argument("port", type=int)
arguments.add_argument("name")
arguments.add_argument("--on", default="0.0.0.0", help="the address to listen on")
arguments.add_argument("--fd", type=int, help="a socket that listens already")
arguments.add_argument("--storm", type=int, default=0, help="listening sockets to make and close before")
given = arguments.parse_args()

for _ in range(given.storm):
    passing = socket.socket()
    passing.bind(("", 0))
    passing.listen()
    passing.close()
if given.fd is None:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((given.on, given.port))
else:
    server = socket.socket(fileno=given.fd)


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
        connection.sendall(f"HTTP/1.0 200 OK\r\n\r\n{given.name}\n".encode())
    except OSError:
        pass
    connection.close()
