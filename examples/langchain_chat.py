"""A LangChain chat model with memory.

Needs a server with the memory API at 127.0.0.1:8000 (docs/server.md) and, in any environment:

    pip install langchain-openai
    python examples/langchain_chat.py

The memory of the user "langchain-example" is replaced.
"""

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

URL = "http://127.0.0.1:8000/v1"
KEY = os.environ.get("INFERSCALE_API_KEY", "none")
USER = "langchain-example"
FACTS = (
    "My sister Ingrid lives in Oslo.",
    "I am allergic to walnuts.",
    "My locker code at the gym is 4471.",
)


def main() -> None:
    server = OpenAI(base_url=URL, api_key=KEY)
    server.delete(f"/memories?user_id={USER}", cast_to=object)
    server.post(
        "/memories", cast_to=object, body={"user_id": USER, "items": [{"text": fact} for fact in FACTS]}
    )

    memory = {"user_id": USER, "top_k": 20}
    llm = ChatOpenAI(
        base_url=URL,
        api_key=KEY,
        model=server.models.list().data[0].id,
        temperature=0,
        max_completion_tokens=32,
        extra_body={"memory": memory},
    )
    print(llm.invoke("Where does my sister live?").text)

    # In a chain, piece by piece. What is stored is found by the next question.
    prompt = ChatPromptTemplate([("system", "You are brief."), ("user", "{question}")])
    chain = prompt | llm.bind(extra_body={"memory": {**memory, "store": True}})
    for piece in chain.stream({"question": "What must I not eat?"}):
        print(piece.text, end="", flush=True)
    print()

    # LangChain drops what it does not know from answers, and so the `memory` object that says what was
    # injected. `inferscale.Client` and the OpenAI SDK have it.


if __name__ == "__main__":
    main()
