"""Frameworks ask the bundled model what it knows, each in its own way, and get its answer."""

import asyncio
from typing import Any

QUESTION = "What does len do?"
ANSWER = "len() returns the length (the number of items) of an object."
MODEL = "rill"


def test_litellm(base_url: str) -> None:
    import litellm

    turns = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "messages": turns, "api_base": base_url}
    assert litellm.completion(**options).choices[0].message.content == ANSWER
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)]
    assert "".join(pieces) == ANSWER
    vectors = litellm.embedding(model="openai/sentence_encoder", input=["one", "two"], api_base=base_url).data
    assert len(vectors) == 2 and vectors[0]["embedding"]


def test_litellm_speaks_anthropic(url: str) -> None:
    import litellm

    turns = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(model=f"anthropic/{MODEL}", messages=turns, api_base=url, max_tokens=50)
    assert answer.choices[0].message.content == ANSWER


def test_langchain(base_url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(base_url=base_url, model=MODEL)
    assert chat.invoke(QUESTION).content == ANSWER
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == ANSWER
    embeddings = OpenAIEmbeddings(base_url=base_url, model="sentence_encoder", check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["one", "two"])) == 2


def test_langgraph(base_url: str) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    chat = ChatOpenAI(base_url=base_url, model=MODEL)
    graph = StateGraph(MessagesState)
    graph.add_node("answer", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    assert graph.compile().invoke({"messages": [("user", QUESTION)]})["messages"][-1].content == ANSWER


def test_llama_index(base_url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model=MODEL, api_base=base_url, api_key="unused", is_chat_model=True, context_window=1024)
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content == ANSWER
    assert [each.delta for each in llm.stream_chat([ChatMessage(role="user", content=QUESTION)])]


def test_instructor(base_url: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel, ConfigDict

    class Verdict(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_built_in: bool

    client = instructor.from_openai(openai.OpenAI(base_url=base_url), mode=instructor.Mode.JSON_SCHEMA)
    turns: Any = [{"role": "user", "content": QUESTION}]
    verdict = client.chat.completions.create(model=MODEL, response_model=Verdict, messages=turns, max_retries=0)
    assert isinstance(verdict.is_built_in, bool)


def test_pydantic_ai(base_url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url)))
    assert agent.run_sync(QUESTION).output == ANSWER


def test_haystack(base_url: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage

    found = OpenAIChatGenerator(model=MODEL, api_base_url=base_url).run([ChatMessage.from_user(QUESTION)])
    assert found["replies"][0].text == ANSWER


def test_dspy(base_url: str) -> None:
    import dspy

    assert dspy.LM(f"openai/{MODEL}", api_base=base_url, cache=False)(QUESTION) == [ANSWER]


def test_openai_agents_by_chat_completions(base_url: str) -> None:
    import agents
    from openai import AsyncOpenAI

    async def ask() -> str:
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=base_url))
        result = await agents.Runner.run(agents.Agent(name="one", model=model), QUESTION)
        return str(result.final_output)

    assert asyncio.run(ask()) == ANSWER


def test_openai_agents_by_responses(base_url: str) -> None:
    import agents
    from openai import AsyncOpenAI

    async def ask() -> list[str]:
        client = AsyncOpenAI(base_url=base_url)
        agent = agents.Agent(name="one", model=agents.OpenAIResponsesModel(model=MODEL, openai_client=client))
        whole = await agents.Runner.run(agent, QUESTION)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        num_events = len([event async for event in streamed.stream_events()])
        later = await agents.Runner.run(agent, QUESTION, previous_response_id=whole.last_response_id)
        assert num_events > 5 and later.final_output
        return [str(whole.final_output), str(streamed.final_output)]

    assert asyncio.run(ask()) == [ANSWER] * 2


def test_langchain_by_responses(base_url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=base_url, temperature=0, use_responses_api=True)
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER


def test_langchain_gets_calls_of_its_tools(base_url: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = ChatOpenAI(base_url=base_url, model=MODEL).bind_tools([add], tool_choice="add")
    [call] = chat.invoke("What is 2 plus 3?").tool_calls
    assert call["name"] == "add" and {name: type(value) for name, value in call["args"].items()} == {"a": int, "b": int}
    assert isinstance(add.invoke(call["args"]), int)


def test_instructor_by_tools(base_url: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Sum(BaseModel):
        a: int = Field(ge=0, le=99)
        b: int = Field(ge=0, le=99)

    client = instructor.from_openai(openai.OpenAI(base_url=base_url))
    turns: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
    answer = client.chat.completions.create(model=MODEL, response_model=Sum, messages=turns, max_retries=0)
    assert 0 <= answer.a <= 99 and 0 <= answer.b <= 99


def test_anthropic_uses_a_tool(url: str) -> None:
    import anthropic

    tool: Any = {
        "name": "add",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    with anthropic.Anthropic(base_url=url).messages.stream(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "What is 2 plus 3?"}],
        tools=[tool],
        tool_choice={"type": "tool", "name": "add"},
    ) as stream:
        [block] = stream.get_final_message().content
    assert block.type == "tool_use" and isinstance(block.input["a"], int)
