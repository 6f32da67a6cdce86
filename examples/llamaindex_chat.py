"""A LlamaIndex chat model with memory.

Needs a server with the memory API at 127.0.0.1:8000 (docs/server.md) and, in any environment:

    pip install llama-index-llms-openai-like
    python examples/llamaindex_chat.py

The memory of the user "llamaindex-example" is replaced.
"""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

URL = "http://127.0.0.1:8000/v1"
KEY = os.environ.get("INFERSCALE_API_KEY", "none")
USER = "llamaindex-example"
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

    llm = OpenAILike(
        api_base=URL,
        api_key=KEY,
        model=server.models.list().data[0].id,
        is_chat_model=True,
        temperature=0,
        max_tokens=32,
        additional_kwargs={"extra_body": {"memory": {"user_id": USER, "top_k": 20}}},
    )
    response = llm.chat([ChatMessage("Where does my sister live?")])
    print(response.message.content)
    print("  ", response.raw.memory["injected_tokens"], "tokens injected")

    for response in llm.stream_chat([ChatMessage("What must I not eat?")]):
        print(response.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
