"""Serves every name under a prefix with one socket, and greets whoever comes by the name that it goes by.

Run: python3 prefix_server.py sid:3f00/8
"""

import sys

import margay

with margay.listen_prefix(sys.argv[1]) as listener:
    print(f"serving {sys.argv[1]}", flush=True)
    while True:
        conn, peer = listener.accept()
        with conn, conn.makefile("rw") as file:
            file.write(f"hello {peer}, this is {sys.argv[1]}\n")
            file.flush()
            # To close with something unread would reset the connection, and the greeting with it.
            file.read()
