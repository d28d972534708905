"""Says what the agent tells this user of its flows, one line each."""

import os
import socket
import sys

uid = int(sys.argv[1])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.connect("/run/margay/programs.sock")
agent.send(bytes([1, 6]) + bytes(54))
assert agent.recv(2000)[1:4] == bytes([6, 0, 0])
print("ready", flush=True)
while message := agent.recv(2000):
    print(message[1], message[60:].decode(), flush=True)
