// The chat box: one question with injected memory and, beside it, the same with memory as text.

import { Exchange } from "./answer.js";
import { byId, make } from "./dom.js";
import { clearWarning, report, say, warn } from "./notices.js";

/** Dispatches "stored" when what was said is remembered. */
export class Chat extends EventTarget {
  #api;
  #scope;
  #running = null; // AbortController of the question that is being answered

  constructor(api, scope) {
    super();
    this.#api = api;
    this.#scope = scope;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
  }

  /** Fill the list of models; the one that was chosen stays chosen. */
  async loadModels() {
    const select = byId("model");
    try {
      const { data } = await this.#api.models();
      const chosen = select.value;
      select.replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === chosen }, id)));
    } catch (error) {
      report(error, "The models could not be listed");
    }
  }

  async #ask() {
    const question = byId("question").value.trim();
    if (this.#running || !question) return;
    if (this.#scope.isEmpty) {
      warn("Name a user, an agent or a run first: its memory answers.");
      this.#scope.ask();
      return;
    }
    clearWarning();
    const modes = byId("compare").checked ? ["inject", "text"] : ["inject"];
    const exchange = new Exchange(question);
    byId("answers").prepend(exchange.element);
    this.#setRunning(new AbortController());
    const answers = [];
    try {
      for (const mode of modes) {
        // What is said is remembered after the last answer: both are to see the same memory.
        const isLast = mode === modes.at(-1);
        answers.push(await this.#answer(exchange.begin(mode), this.#body(question, mode, isLast)));
      }
      if (answers.length === 2) exchange.compare(...answers);
      if (byId("question").value.trim() === question) byId("question").value = "";
      say("The answer is complete.");
      if (answers.at(-1).memory?.stored) this.dispatchEvent(new Event("stored"));
    } catch (error) {
      if (error.name === "AbortError") say("The answer was stopped.");
      else report(error, "The question was not answered"); // it stays in its field
    } finally {
      this.#setRunning(null);
    }
  }

  async #answer(card, body) {
    try {
      const onProgress = (answer) => card.progress(answer);
      const answer = await this.#api.chat(body, { signal: this.#running.signal, onProgress });
      card.finish(answer);
      return answer;
    } catch (error) {
      card.fail(error.name === "AbortError" ? "Stopped." : error.message);
      throw error;
    }
  }

  #body(question, mode, isLast) {
    return {
      model: byId("model").value || undefined,
      messages: [{ role: "user", content: question }],
      max_tokens: Number(byId("max-tokens").value),
      temperature: 0,
      memory: {
        ...this.#scope.value,
        mode,
        top_k: Number(byId("top-k").value),
        store: isLast && byId("store").checked,
      },
    };
  }

  #setRunning(controller) {
    const hadFocus = [byId("ask"), byId("stop")].includes(document.activeElement);
    this.#running = controller;
    byId("ask").disabled = controller !== null;
    byId("stop").hidden = controller === null;
    if (hadFocus) byId(controller ? "stop" : "question").focus();
  }
}
