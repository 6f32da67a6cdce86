"""Time to first token with injected and with prefilled memory, through the OpenAI SDK.

Needs a server with the memory API at 127.0.0.1:8000 (docs/server.md) and, in any environment:

    pip install openai
    python examples/openai_sdk.py

The memory of the user "openai-example" is replaced.
"""

import os
import time

from openai import OpenAI

USER = "openai-example"
FACTS = [
    "My sister Ingrid lives in Oslo.",
    "I am allergic to walnuts.",
    "My locker code at the gym is 4471.",
    *(
        f"On day {day} I walked {day % 7 + 2} km along the river and then read for an hour."
        for day in range(1, 38)
    ),
]
QUESTIONS = ("Where does my sister live?", "What is the code of my locker?", "What must I not eat?")


def main() -> None:
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=os.environ.get("INFERSCALE_API_KEY", "none"))
    model = client.models.list().data[0].id
    remember(client)
    ask(client, model, "Hello!", "none")  # the first request of a server is slower
    for question in QUESTIONS:
        print(question)
        for mode in ("inject", "text"):
            print(f"  {mode:6}  {ask(client, model, question, mode)}")


def remember(client: OpenAI) -> None:
    client.delete(f"/memories?user_id={USER}", cast_to=object)
    client.post(
        "/memories", cast_to=object, body={"user_id": USER, "items": [{"text": fact} for fact in FACTS]}
    )
    # Facts can be used at once, as text. Their KV is computed in the background.
    until = time.monotonic() + 120
    while time.monotonic() < until:
        stats = client.get(f"/memories/stats?user_id={USER}", cast_to=object)
        if stats["injectable"] == stats["facts"]:
            return
        time.sleep(0.2)
    print(f"The KV of {stats['injectable']} of {stats['facts']} facts is there; the others are prefilled.")


def ask(client: OpenAI, model: str, question: str, mode: str) -> str:
    """The answer of a stream with its time to first token."""
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        temperature=0,
        stream=True,
        extra_body={"memory": {"user_id": USER, "top_k": 40, "mode": mode}},
    )
    ttft_ms, text, memory = 0.0, "", None
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            ttft_ms = ttft_ms or (time.perf_counter() - started) * 1000
            text += piece
        memory = (chunk.model_extra or {}).get("memory", memory)  # in the last chunk
    tokens = (
        f"{memory['injected_tokens']!s:>5} injected {memory['prefilled_tokens']!s:>5} prefilled"
        if memory
        else ""
    )
    return f"TTFT {ttft_ms:7.0f} ms  {tokens}  {' '.join(text.split())}"


if __name__ == "__main__":
    main()
