// One memory in the list.

import { excerpt, make, score, time } from "./dom.js";
import { hasMetadata } from "./dialogs.js";

/** actions: {edit, history, remove}, each called with the memory. scope: the one shown, which goes without saying. isFresh: added just now. */
export function memoryItem(memory, actions, { scope, isFresh }) {
  const button = (word, action, style) => make(
    "button",
    { type: "button", class: style, "data-action": word.toLowerCase(), "aria-label": `${word}: ${excerpt(memory.text)}`,
      on: { click: () => action(memory) } },
    word,
  );
  return make(
    "li", { class: "memory", "data-id": memory.id },
    make("p", { class: "text" }, memory.text),
    make("div", { class: "meta" }, ...details(memory, scope)),
    make(
      "div", { class: "row" },
      make("span", { class: "meta" }, ...badges(memory, isFresh)),
      make("span", { class: "buttons" }, button("Edit", actions.edit), button("History", actions.history),
        button("Delete", actions.remove, "danger")),
    ),
  );
}

/** Show whether the memory's KV is in the pool now. */
export function showInjectable(item, isInjectable) {
  const old = item.querySelector("[data-badge=injectable]");
  if (old && old.classList.contains("injectable") !== isInjectable) old.replaceWith(injectableBadge(isInjectable));
}

function badges(memory, isFresh) {
  return [
    "score" in memory ? make("span", { class: "badge" }, `score ${score(memory.score)}`) : null,
    injectableBadge(memory.injectable),
    isFresh ? make("span", { class: "badge fresh" }, "new") : null,
  ];
}

function injectableBadge(isInjectable) {
  const title = isInjectable ? "Its KV is in the pool: it can be injected" : "Its KV is not in the pool: it is prefilled as text";
  return make(
    "span",
    { class: isInjectable ? "badge injectable" : "badge", "data-badge": "injectable", title },
    isInjectable ? "injectable" : "as text only",
  );
}

function details(memory, scope) {
  const owner = (word) => {
    const value = memory[`${word}_id`];
    return value && !scope[`${word}_id`] ? make("span", {}, `${word} ${value}`) : null;
  };
  return [
    memory.speaker ? make("span", {}, memory.speaker) : null,
    memory.said_at ? make("span", {}, `said ${memory.said_at}`) : null,
    owner("user"),
    owner("agent"),
    owner("run"),
    hasMetadata(memory) ? make("span", {}, JSON.stringify(memory.metadata)) : null,
    make("span", {}, "stored ", time(memory.created_at) ?? "–"),
  ];
}
