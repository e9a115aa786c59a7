import agents
from openai import AsyncOpenAI
from tools import BASE, QUESTION, TOOLS

client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="unused")
model = agents.OpenAIResponsesModel(model="scripted", openai_client=client)
agent = agents.Agent(name="one", model=model, tools=[agents.function_tool(each) for each in TOOLS])
print(agents.Runner.run_sync(agent, QUESTION).final_output)
