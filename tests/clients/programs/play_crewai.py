from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from tools import BASE, QUESTION, TOOLS

model = LLM(model="openai/scripted", base_url=f"{BASE}/v1", api_key="unused")
agent = Agent(role="Clerk", goal="Do as told.", backstory="-", llm=model, tools=[tool(each) for each in TOOLS])
task = Task(description=QUESTION, expected_output="A sentence.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
