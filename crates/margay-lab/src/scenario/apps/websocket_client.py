# Opens a WebSocket by the service's name: two hundred short messages, and a long one.
import asyncio
import os

import websockets


async def use():
    name, port, word = (os.environ[key] for key in ("NAME", "PORT", "WORD"))
    with open(os.environ["PAYLOAD"], "rb") as file:
        payload = file.read()
    async with websockets.connect(f"ws://{name}:{port}/", max_size=None) as socket:
        for number in range(200):
            await socket.send(f"{word} {number}")
            assert await socket.recv() == f"{word} {number}"
        await socket.send(payload)
        assert await socket.recv() == payload
    print(f"{word}: 200 messages and {len(payload)} bytes came back")


asyncio.run(use())
