// What the page says about what was just done. The two regions are read out by screen readers.

import { byId, make } from "./dom.js";

/** Something went well. */
export function say(text) {
  clearWarning();
  byId("status").textContent = text;
}

/** Something went wrong: stays until it is dismissed or something goes well. */
export function warn(text) {
  byId("status").textContent = "";
  const dismiss = make("button", { type: "button", on: { click: clearWarning } }, "Dismiss");
  byId("alert").replaceChildren(make("p", {}, text), dismiss);
}

/** An error of a request. A missing key has been asked for already. */
export function report(error, doing) {
  if (error.status === 401 || error.name === "AbortError") return;
  if (!("status" in error)) console.error(error); // ours, not the server's
  warn(`${doing}: ${error.message}`);
}

export function clearWarning() {
  byId("alert").replaceChildren();
}
