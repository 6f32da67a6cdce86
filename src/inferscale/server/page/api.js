// The server as this page sees it: JSON requests, errors in words, and a streamed chat. Knows no elements.

import { EventParser } from "./sse.js";

// This file is served below /memory, wherever a proxy has put that.
const ROOT = new URL("../", import.meta.url);

/** status: of the answer; 0 where there was none. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Sends requests with the key. Dispatches "unauthorized" when an answer is 401. */
export class Api extends EventTarget {
  key = "";

  list(scope, { limit, after }) {
    return this.#json("GET", "v1/memories", { query: { ...scope, limit, after } });
  }

  add(body) {
    return this.#json("POST", "v1/memories", { body });
  }

  search(body) {
    return this.#json("POST", "v1/memories/search", { body });
  }

  update(id, changes) {
    return this.#json("PUT", memoryPath(id), { body: changes });
  }

  remove(id) {
    return this.#json("DELETE", memoryPath(id));
  }

  removeAll(scope) {
    return this.#json("DELETE", "v1/memories", { query: scope });
  }

  history(id) {
    return this.#json("GET", `${memoryPath(id)}/history`);
  }

  warm(scope) {
    return this.#json("POST", "v1/memories/warm", { body: scope });
  }

  setInjection(enabled) {
    return this.#json("PUT", "v1/memories/injection", { body: { enabled } });
  }

  stats(scope, timeout_ms) {
    return this.#json("GET", "v1/memories/stats", { query: scope, signal: AbortSignal.timeout(timeout_ms) });
  }

  models() {
    return this.#json("GET", "v1/models");
  }

  /**
   * One streamed chat completion. onProgress is called with the answer so far at each piece of it:
   * {text, reasoning, memory, finish, ttft_ms, total_ms}. ttft_ms: from sending to the first piece with
   * content; a model that thinks aloud shows its first token there.
   */
  async chat(body, { signal, onProgress }) {
    const answer = { text: "", reasoning: "", memory: null, finish: null, ttft_ms: null, total_ms: null };
    const started = performance.now();
    const response = await this.#send("POST", "v1/chat/completions", { body: { ...body, stream: true }, signal });
    for await (const data of streamed(response)) {
      if (data === "[DONE]") {
        answer.total_ms = performance.now() - started;
        return answer;
      }
      const piece = take(data, answer);
      if (piece && answer.ttft_ms === null) answer.ttft_ms = performance.now() - started;
      onProgress(answer);
    }
    throw new ApiError("The stream ended before the answer was complete.", response.status);
  }

  async #json(method, path, options) {
    const response = await this.#send(method, path, options);
    try {
      return await response.json();
    } catch (error) {
      throw asApiError(error, "The server's answer is not the JSON that was expected.");
    }
  }

  async #send(method, path, { query = {}, body, signal } = {}) {
    const url = new URL(path, ROOT);
    for (const [name, value] of Object.entries(query)) {
      if (value !== null && value !== undefined) url.searchParams.set(name, value);
    }
    const headers = {};
    const sentKey = this.key;
    if (sentKey) headers.Authorization = `Bearer ${sentKey}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(url, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
    } catch (error) {
      throw asApiError(error, "The server cannot be reached.");
    }
    if (response.ok) return response;
    // An answer to an older key says nothing about the one in use now.
    if (response.status === 401 && sentKey === this.key) this.dispatchEvent(new Event("unauthorized"));
    throw new ApiError(await messageOf(response), response.status);
  }
}

const memoryPath = (id) => `v1/memories/${encodeURIComponent(id)}`;

/** What is wrong, as the server says it; vLLM's own errors have other forms than the memory API's. */
async function messageOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // No JSON: an error of a proxy, say. Its status has to do.
  }
  const said = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  return typeof said === "string" && said ? said : `The server answered with status ${response.status}.`;
}

function asApiError(error, message) {
  if (error.name === "AbortError") return error;
  if (error.name === "TimeoutError") return new ApiError("The server does not answer in time.", 0);
  return new ApiError(message, 0);
}

async function* streamed(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        throw asApiError(error, "The connection broke off before the answer was complete.");
      }
      if (part.done) return;
      yield* parser.feed(part.value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Add one chunk to the answer; whether it had content. */
function take(data, answer) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError("The server streamed something that is not JSON.", 200);
  }
  if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), chunk.error.code ?? 500);
  if (chunk.memory) answer.memory = chunk.memory;
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const reasoning = choice?.delta?.reasoning ?? choice?.delta?.reasoning_content ?? "";
  answer.text += text;
  answer.reasoning += reasoning;
  answer.finish = choice?.finish_reason ?? answer.finish;
  return Boolean(text || reasoning);
}
