"""Prints what happens to this user's flows. Run: python3 events.py"""

import asyncio

import margay


async def main() -> None:
    async with margay.events() as events:
        print("listening", flush=True)
        async for event in events:
            print(event.kind, event.name or event.service, event.why or "", flush=True)


try:
    asyncio.run(main())
except margay.AgentDown as error:
    print(error.strerror)
