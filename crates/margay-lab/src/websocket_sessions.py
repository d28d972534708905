# WebSockets that ask all the time: numbered messages, each of which the server sends back with the number of the
# message in its connection. Prints a line of JSON when all are open, for each line of input when each was answered once
# more, and at the end of the input when all are closed.
import asyncio
import json
import os
import sys
import time

import websockets

LIMIT_S = 20
ERRORS_MAX = 3


class Session:
    def __init__(self, socket, tally):
        self.socket, self.tally = socket, tally
        self.open, self.answered = True, 0
        self.wait_ms, self.asked_at = 0.0, None

    async def talk(self, every_s):
        try:
            while not self.tally.over:
                number = self.answered + 1
                self.asked_at = time.monotonic()
                await self.socket.send(f"message {number}")
                answer = await self.socket.recv()
                self.wait_ms = max(self.wait_ms, (time.monotonic() - self.asked_at) * 1e3)
                self.asked_at = None
                self.answered = number
                self.tally.answers += 1
                if answer != f"{number} message {number}":
                    self.tally.wrong += 1
                    self.tally.complain(f"message {number} was answered {answer!r}")
                await asyncio.sleep(every_s)
            await self.socket.close()
        except (OSError, websockets.WebSocketException) as error:
            self.open = False
            self.tally.complain(f"after {self.answered} answers: {error!r}")


class Tally:
    def __init__(self):
        self.sessions, self.over = [], False
        self.answers, self.wrong, self.errors = 0, 0, []

    def complain(self, error):
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(error)

    async def prove(self):
        """Each that is open is answered a message that it says from now on; gives how many are not."""
        wanted = {session: session.answered + 2 for session in self.sessions}
        until = time.monotonic() + LIMIT_S
        while True:
            left = [one for one, answers in wanted.items() if one.open and one.answered < answers]
            if not left or time.monotonic() > until:
                return len(left)
            await asyncio.sleep(0.005)

    def say(self, hung=0):
        still = [session for session in self.sessions if session.open]
        talked = {
            "open": len(still),
            "hung": hung,
            "answers": self.answers,
            "wrong": self.wrong,
            "errors": self.errors,
            "waits_ms": [session.wait_ms for session in still],
        }
        print(json.dumps(talked), flush=True)
        self.errors = []
        for session in self.sessions:
            session.wait_ms = 0.0


async def main():
    uri, count, every_ms = os.environ["URI"], int(os.environ["COUNT"]), int(os.environ["EVERY_MS"])
    tally = Tally()
    for _ in range(count):
        socket = await websockets.connect(uri, open_timeout=LIMIT_S, ping_interval=None)
        tally.sessions.append(Session(socket, tally))
    tasks = [asyncio.create_task(session.talk(every_ms / 1e3)) for session in tally.sessions]
    tally.say(await tally.prove())
    while await asyncio.to_thread(sys.stdin.readline):
        tally.say(await tally.prove())
    tally.over = True
    _, late = await asyncio.wait(tasks, timeout=LIMIT_S)
    tally.say(len(late))


asyncio.run(main())
