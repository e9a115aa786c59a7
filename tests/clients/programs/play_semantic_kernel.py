import asyncio

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from tools import BASE, QUESTION, TOOLS


class Files:
    """The tools as a plugin."""

    read_notes, write_answer, count_bytes = (staticmethod(kernel_function(each)) for each in TOOLS)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused")
    service = OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    print((await ChatCompletionAgent(service=service, plugins=[Files()]).get_response(QUESTION)).content)


asyncio.run(main())
