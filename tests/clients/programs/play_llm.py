from llm.default_plugins.openai_models import Chat
from tools import BASE, QUESTION, TOOLS

model = Chat("scripted", api_base=f"{BASE}/v1", supports_tools=True)
print(model.chain(QUESTION, tools=list(TOOLS), key="unused").text())
