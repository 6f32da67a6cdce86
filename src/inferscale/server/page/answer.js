// A question with its answers, side by side: text, numbers and the facts that were used.

import { counted, make, milliseconds, number, score } from "./dom.js";

const TITLES = { inject: "Injected", text: "As text" };

/** One question; answers are added in the order in which they are asked for. */
export class Exchange {
  #pair = make("div", { class: "pair" });
  #verdict = make("p", { class: "verdict" });

  constructor(question) {
    this.element = make("article", { class: "exchange" }, make("h3", { class: "text" }, question), this.#verdict, this.#pair);
  }

  begin(mode) {
    const answer = new Answer(mode);
    this.#pair.append(answer.element);
    return answer;
  }

  /** What the two times to the first token say; each is one measurement. */
  compare(inject, text) {
    if (!inject.ttft_ms || !text.ttft_ms) return;
    const ratio = text.ttft_ms / inject.ttft_ms;
    const words = ratio >= 1 ? `${ratio.toFixed(1)} times sooner` : `${(1 / ratio).toFixed(1)} times later`;
    const cached = text.memory?.cached_tokens
      ? ` ${counted(text.memory.cached_tokens, "token")} of the text came from vLLM’s prefix cache.` : "";
    this.#verdict.textContent = `First token ${words} with injection: `
      + `${milliseconds(inject.ttft_ms)} beside ${milliseconds(text.ttft_ms)}.${cached}`;
  }
}

class Answer {
  #text = make("p", { class: "text answer-text" }, "…");
  #reasoning = make("details", { hidden: true }, make("summary", {}, "Reasoning"), make("p", { class: "text" }));
  #rest = make("div", { class: "numbers" });
  #error = make("p", { class: "error" });

  constructor(mode) {
    this.element = make(
      "section", { class: "answer", "data-mode": mode, "aria-busy": "true", "aria-label": `Answer: ${TITLES[mode]}` },
      make("h4", {}, TITLES[mode]), this.#reasoning, this.#text, this.#error, this.#rest,
    );
  }

  progress(answer) {
    this.#text.textContent = answer.text || "…";
    this.#reasoning.hidden = !answer.reasoning;
    this.#reasoning.lastChild.textContent = answer.reasoning;
  }

  finish(answer) {
    this.element.removeAttribute("aria-busy");
    this.progress(answer);
    if (!answer.text) this.#text.textContent = "(no text)";
    this.#rest.replaceChildren(numbers(answer), ...(answer.memory ? [facts(answer.memory)] : []));
  }

  /** Keeps what has arrived. */
  fail(message) {
    this.element.removeAttribute("aria-busy");
    if (this.#text.textContent === "…") this.#text.textContent = "";
    this.#error.textContent = message;
  }
}

function numbers({ ttft_ms, total_ms, finish, memory }) {
  const rows = [["Time to first token", milliseconds(ttft_ms), "ttft"], ["Whole answer", milliseconds(total_ms)]];
  if (memory) {
    rows.push(
      ["Injected tokens", number(memory.injected_tokens), "injected"],
      ["Prefilled tokens", number(memory.prefilled_tokens), "prefilled"],
      ["Missing tokens", number(memory.missing_tokens), "missing"],
      ["From vLLM’s prefix cache", number(memory.cached_tokens)],
    );
    if (memory.timings_ms) rows.push(["Recall on the server", milliseconds(sum(Object.values(memory.timings_ms)))]);
    if (memory.left_out) rows.push(["Facts that did not fit", number(memory.left_out)]);
    if (memory.stored) rows.push(["Remembered", "yes"]);
    if (memory.reason) rows.push(["Not injected", String(memory.reason)]);
  } else {
    rows.push(["Memory", "not in the answer"]);
  }
  if (finish === "length") rows.push(["Cut at", "the limit of answer tokens"]);
  return make("dl", {}, ...rows.flatMap(([name, value, style]) => [
    make("dt", {}, name), make("dd", { class: style, "data-number": style }, value),
  ]));
}

function facts(memory) {
  if (!memory.facts.length) return make("p", { class: "note" }, "No facts were used.");
  const title = counted(memory.facts.length, "fact");
  const list = make(
    "ol", { class: "facts", tabindex: "0", "aria-label": "Facts used, with scores" },
    ...memory.facts.map((fact) => make(
      "li", {},
      make("span", { class: "score" }, score(fact.score)),
      make("span", { class: "text" }, saidBy(fact), fact.text),
    )),
  );
  return make("details", {}, make("summary", {}, `${title} used`), list);
}

/** Such as "Ana, 8 May 2023: "; "" where neither is known. */
function saidBy({ speaker, said_at }) {
  const known = [speaker, said_at].filter(Boolean).join(", ");
  return known && `${known}: `;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
