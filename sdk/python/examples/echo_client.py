"""Says something to a service, under a name of its own, and prints what comes back.

Run: python3 echo_client.py echo.shop hello
"""

import socket
import sys

import margay

with margay.connect(sys.argv[1], source=margay.OWN, timeout=20) as sock:
    sock.sendall(sys.argv[2].encode())
    sock.shutdown(socket.SHUT_WR)
    with sock.makefile() as answer:
        print(answer.read())
