import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig
from tools import BASE, QUESTION, TOOLS


async def main() -> None:
    config = OpenAIConfig(model="scripted", base_url=f"{BASE}/v1", api_key="unused", streaming=True)
    print((await Agent("one", config=config, tools=TOOLS).ask(QUESTION)).body)


asyncio.run(main())
