# A WebSocket server that sends everything back.
import asyncio
import os

import websockets


async def echo(socket):
    async for message in socket:
        await socket.send(message)


async def serve():
    async with websockets.serve(echo, "0.0.0.0", int(os.environ["PORT"]), max_size=None):
        await asyncio.Future()


asyncio.run(serve())
