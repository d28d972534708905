# Connections that end while their boxes are changed.
#
#   ends.py serve PORT
#   ends.py connect ADDRESS PORT ROUNDS DELAYS
#
# Each connection has a plan, which its first line tells the server: who ends it, how, in which round and how long after
# its beginning. Both ends send a pattern until then. Each SIGUSR1 begins a round; after the last one what is still
# there ends. Each end says what became of it (JSON), and "all" when nothing is left.
import asyncio
import json
import signal
import socket
import struct
import sys

STEP_S = 0.05
CHUNK = 100
LINE_LEN = 32
LIMIT_S = 12
BEGUN = []


def say(text):
    print(text, flush=True)


def pattern(number, is_client, at, count):
    return bytes((place * 7 + number + (100 if is_client else 0)) % 251 for place in range(at, at + count))


class End:
    """One end of a connection. `how`: fin; rst; half, one direction closes early and the other one at last; idle."""

    def __init__(self, reader, writer, plan, is_client):
        self.reader = reader
        self.writer = writer
        self.number, self.by, self.how, self.round, self.delay = plan
        self.is_client = is_client
        self.is_first = (self.by == "client") == is_client
        self.sent = self.received = self.wrong = 0
        self.peer_closed = asyncio.Event()
        self.end = ""

    async def write(self, count):
        self.writer.write(pattern(self.number, self.is_client, self.sent, count))
        self.sent += count
        await self.writer.drain()

    async def keep_sending(self, until):
        waiting = asyncio.ensure_future(until)
        while not waiting.done():
            if self.how != "idle":
                await self.write(CHUNK)
            await asyncio.wait([waiting], timeout=STEP_S)

    async def my_turn(self):
        await BEGUN[self.round].wait()
        await asyncio.sleep(self.delay)

    async def its_turn(self):
        await self.peer_closed.wait()
        if self.how == "half":
            await BEGUN[-1].wait()

    async def send(self):
        await self.keep_sending(self.my_turn() if self.is_first else self.its_turn())
        if self.is_first and self.how == "rst":
            # Nothing more is read: what is under way does not count.
            own = self.writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
            self.end = "aborted"
            return
        if self.how == "idle":
            await self.write(10)
        self.writer.write_eof()

    async def receive(self):
        while data := await self.reader.read(65536):
            wanted = pattern(self.number, not self.is_client, self.received, len(data))
            self.wrong += data != wanted
            self.received += len(data)
        self.peer_closed.set()

    async def run(self):
        sending = asyncio.create_task(self.send())
        receiving = asyncio.create_task(self.receive())

        async def both():
            try:
                await asyncio.gather(sending, receiving)
                self.end = self.end or "closed"
            except OSError as error:
                self.end = self.end or ("reset" if isinstance(error, ConnectionError) else str(error))

        whole = asyncio.create_task(both())
        await BEGUN[-1].wait()
        done, _ = await asyncio.wait([whole], timeout=LIMIT_S)
        if not done:
            self.end = self.end or "hung"
        for task in (sending, receiving, whole):
            task.cancel()
        self.writer.transport.abort()
        names = ("number", "by", "how", "round", "delay", "sent", "received", "wrong", "end")
        say(json.dumps({name: getattr(self, name) for name in names}))


async def serve(port):
    ends = []

    async def accepted(reader, writer):
        plan = (await reader.readexactly(LINE_LEN)).decode().split()
        # How many rounds there are is the first word.
        while len(BEGUN) < int(plan[0]):
            BEGUN.append(asyncio.Event())
        plan = (int(plan[1]), plan[2], plan[3], int(plan[4]), float(plan[5]))
        ends.append(asyncio.create_task(End(reader, writer, plan, False).run()))

    server = await asyncio.start_server(accepted, "0.0.0.0", port, backlog=512)
    say("listens")
    await FINISHED.wait()
    await asyncio.gather(*ends)
    server.close()
    say("all")


async def connect(address, port, rounds, delays):
    BEGUN.extend(asyncio.Event() for _ in range(rounds + 1))
    plans = [
        (by, how, round, delay * STEP_S)
        for round in range(rounds)
        for by in ("client", "server")
        for how in ("fin", "rst")
        for delay in range(delays)
    ]
    plans += [(by, "half", 0, 0) for by in ("client", "server") for _ in range(2)]
    plans += [("client", "idle", rounds, 0)] * 2
    ends = []
    for number, plan in enumerate(plans):
        reader, writer = await asyncio.open_connection(address, port)
        by, how, round, delay = plan
        writer.write(f"{rounds + 1} {number} {by} {how} {round} {delay:.3f}".ljust(LINE_LEN).encode())
        ends.append(asyncio.create_task(End(reader, writer, (number, *plan), True).run()))
    say(f"connected {len(ends)}")
    await asyncio.gather(*ends)
    say("all")


def begin_round():
    begun = sum(one.is_set() for one in BEGUN)
    if begun < len(BEGUN):
        BEGUN[begun].set()
    if begun + 1 >= len(BEGUN):
        FINISHED.set()


async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, begin_round)
    words = sys.argv[2:]
    if sys.argv[1] == "serve":
        await serve(int(words[0]))
    else:
        await connect(words[0], int(words[1]), int(words[2]), int(words[3]))


FINISHED = asyncio.Event()
asyncio.run(main())
