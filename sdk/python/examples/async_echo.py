"""The echo server for asyncio. Run: python3 async_echo.py echo.shop"""

import asyncio
import sys

import margay


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    print(f"{await margay.peer_service(writer)} is here", flush=True)
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main() -> None:
    server = await margay.start_server(echo, sys.argv[1])
    print(f"serving {sys.argv[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main())
