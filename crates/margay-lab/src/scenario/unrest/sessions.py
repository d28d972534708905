# Long sessions of real programs, by names of services, each of which checks every answer. One line of JSON for every
# exchange: {"session", "time_us"}, with "wrong" where the answer is not the expected one, or "broken" where the
# session has ended. Runs until it is terminated. Environment: HOME (a directory of this host), OF_<SERVICE> (the
# directory of each server).
import asyncio
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

import websockets

PAUSE_S = 0.1
HOME = os.environ["HOME"]
HOST = socket.gethostname()
OUTPUT = threading.Lock()


def report(session, **more):
    line = json.dumps({"session": f"{session} of {HOST}", "time_us": time.time_ns() // 1000, **more})
    with OUTPUT:
        print(line, flush=True)


def name(service):
    return f"{service}.shop.sal.internal"


def check(session, answer, wanted):
    if answer == wanted:
        report(session)
    else:
        report(session, wrong=f"{answer!r} where {wanted!r} was expected")


def run(words, **options):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-400:]
        raise ConnectionError(f"{words[0]}: exit status {done.returncode}: {said}")
    return done.stdout.decode()


def line_of(program):
    line = program.stdout.readline()
    if not line:
        raise ConnectionError(f"{program.args[0]} has ended with status {program.wait()}")
    return line.strip()


def start(words):
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


# One session of psql, and a row for each exchange.
def postgresql(session):
    table = f"unrest_{HOST}_{os.getpid()}"
    psql = start(["psql", "-h", name("postgresql"), "-p", "5433", "-U", "postgres", "-qAt"])
    psql.stdin.write(f"create table {table} (n int);\n")
    for number in range(1, sys.maxsize):
        psql.stdin.write(f"insert into {table} values ({number}); select count(*), max(n) from {table};\n")
        check(session, line_of(psql), f"{number}|{number}")
        time.sleep(PAUSE_S)


# One connection, by the protocol itself: redis-cli would connect again and hide that the first connection had ended.
def redis(session):
    key = f"unrest:{HOST}:{os.getpid()}"
    connection = socket.create_connection((name("redis"), 6379))
    answers = connection.makefile("rb")
    for number in range(1, sys.maxsize):
        connection.sendall(f"INCR {key}\r\n".encode())
        answer = answers.readline()
        if not answer:
            raise ConnectionError("the server has closed the connection")
        check(session, answer, f":{number}\r\n".encode())
        time.sleep(PAUSE_S)


def websocket(session):
    async def use():
        dice = random.Random(1)
        uri = f"ws://{name('websocket')}:8008/"
        # No keep-alive of its own: an outage of its length would end the session.
        async with websockets.connect(uri, max_size=None, ping_interval=None, open_timeout=30) as connection:
            while True:
                message = dice.randbytes(dice.randrange(1, 30_000))
                await connection.send(message)
                answer = await connection.recv()
                check(session, hashlib.sha256(answer).hexdigest(), hashlib.sha256(message).hexdigest())
                await asyncio.sleep(PAUSE_S)

    asyncio.run(use())


# One publisher and one subscriber, both of which stay.
def mqtt(session):
    to = ["-h", name("mqtt"), "-p", "1884", "-q", "1", "-k", "600", "-t", f"unrest/{HOST}/{os.getpid()}"]
    subscriber = start(["stdbuf", "-oL", "mosquitto_sub", *to])
    publisher = start(["mosquitto_pub", *to, "-l"])
    # The broker says to nobody when the subscription stands: the first message may come before.
    first = "subscribed"
    received = threading.Event()

    def publish_first():
        while not received.is_set():
            publisher.stdin.write(first + "\n")
            received.wait(PAUSE_S * 5)

    announcer = threading.Thread(target=publish_first, daemon=True)
    announcer.start()
    line_of(subscriber)
    received.set()
    announcer.join()
    for number in range(1, sys.maxsize):
        publisher.stdin.write(f"{number}\n")
        answer = line_of(subscriber)
        while answer == first:
            answer = line_of(subscriber)
        check(session, answer, f"{number}")
        time.sleep(PAUSE_S)


# One connection of ssh carries both: a second connect, in the middle of an outage, may fail as any does.
def shared_ssh():
    served = os.environ["OF_OPENSSH"]
    with open(f"{served}/host_key.pub", encoding="ascii") as file:
        key = " ".join(file.read().split()[:2])
    with open(f"{HOME}/known", "w", encoding="ascii") as file:
        file.write(f"[{name('openssh')}]:2222 {key}\n")
    options = ["-F", "/dev/null", "-i", f"{served}/user_key", "-o", f"UserKnownHostsFile={HOME}/known"]
    options += ["-o", "StrictHostKeyChecking=yes", "-o", f"ControlPath={HOME}/ssh-{os.getpid()}", "-p", "2222"]
    master = start(["ssh", *options, "-M", f"root@{name('openssh')}", "echo ready; cat"])
    if line_of(master) != "ready":
        raise ConnectionError("ssh has printed another line than the first one")
    # Where the shared connection has ended, nobody makes another one in silence.
    return " ".join(["ssh", *options, "-o", "ControlMaster=no", "-o", "ProxyCommand=false"]), master


def rsync(session, ssh):
    kept = f"{os.environ['OF_OPENSSH']}/rsync-{HOST}-{os.getpid()}"
    os.makedirs(f"{HOME}/tree", exist_ok=True)
    dice = random.Random(2)
    while True:
        content = dice.randbytes(200_000)
        with open(f"{HOME}/tree/file", "wb") as file:
            file.write(content)
        run(["rsync", "-aI", "-e", ssh, f"{HOME}/tree/", f"root@{name('openssh')}:{kept}/"])
        with open(f"{kept}/file", "rb") as file:
            check(session, hashlib.sha256(file.read()).hexdigest(), hashlib.sha256(content).hexdigest())
        time.sleep(PAUSE_S)


def git(session, ssh):
    bare, own = f"{os.environ['OF_OPENSSH']}/git-{HOST}-{os.getpid()}", f"{HOME}/git-{os.getpid()}"
    of = {**os.environ, "GIT_SSH_COMMAND": ssh, "GIT_SSH_VARIANT": "ssh"}
    for who in ("AUTHOR", "COMMITTER"):
        of.update({f"GIT_{who}_NAME": "lab", f"GIT_{who}_EMAIL": "lab@example.org"})
    run(["git", "init", "-q", "--bare", "-b", "main", bare])
    run(["git", "clone", "-q", f"root@{name('openssh')}:{bare}", own], env=of)
    run(["git", "-C", own, "checkout", "-q", "-B", "main"])
    for number in range(1, sys.maxsize):
        with open(f"{own}/file", "w", encoding="ascii") as file:
            file.write(f"{number}\n")
        run(["git", "-C", own, "add", "file"])
        run(["git", "-C", own, "commit", "-q", "-m", f"number {number}"], env=of)
        run(["git", "-C", own, "push", "-q", "origin", "main"], env=of)
        found = run(["git", "-C", bare, "log", "-1", "--format=%s", "main"]).strip()
        check(session, found, f"number {number}")
        time.sleep(PAUSE_S)


def attend(session, work, *others):
    try:
        work(session, *others)
    except Exception as error:  # Whatever ends a session is reported.
        report(session, broken=f"{type(error).__name__}: {error}")


def main():
    for session, work in [("postgresql", postgresql), ("redis", redis), ("websocket", websocket), ("mqtt", mqtt)]:
        threading.Thread(target=attend, args=(session, work), daemon=True).start()
    try:
        ssh, master = shared_ssh()
    except Exception as error:
        report("ssh", broken=f"{type(error).__name__}: {error}")
        threading.Event().wait()
    for session, work in [("rsync", rsync), ("git", git)]:
        threading.Thread(target=attend, args=(session, work, ssh), daemon=True).start()

    def echo(session):
        for number in range(1, sys.maxsize):
            master.stdin.write(f"{number}\n")
            check(session, line_of(master), f"{number}")
            time.sleep(PAUSE_S)

    attend("ssh", echo)
    threading.Event().wait()


main()
