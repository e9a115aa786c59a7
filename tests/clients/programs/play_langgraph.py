from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tools import BASE, QUESTION, TOOLS

chat = ChatOpenAI(model="scripted", base_url=f"{BASE}/v1", api_key="unused", streaming=True)
print(create_react_agent(chat, list(TOOLS)).invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)
