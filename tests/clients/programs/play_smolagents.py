from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tools import BASE, QUESTION, TOOLS

model = OpenAIServerModel("scripted", api_base=f"{BASE}/v1", api_key="unused")
print(ToolCallingAgent(tools=[tool(each) for each in TOOLS], model=model).run(QUESTION))
