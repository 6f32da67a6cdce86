// The three dialogs. The browser keeps the focus inside and gives it back to where it was.

import { byId, make, time } from "./dom.js";
import { metadataOf } from "./fields.js";

for (const dialog of document.querySelectorAll("dialog")) {
  for (const button of dialog.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => dialog.close(button.dataset.close));
  }
}

/** Show it and wait until it is closed; the answer is "yes" only where a button said so (Escape does not). */
function shown(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}

/** Whether the person agrees. action: the word on the button that does it. */
export async function confirmed({ title, text, action }) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = action;
  return (await shown(byId("confirm-dialog"))) === "yes";
}

/** Let a person change a memory. save: sends the changed fields and returns the new memory. Null: nothing changed. */
export async function edited(memory, save) {
  const dialog = byId("edit-dialog");
  const form = byId("edit-form");
  const button = form.querySelector("[type=submit]");
  byId("edit-text").value = memory.text;
  byId("edit-speaker").value = memory.speaker ?? "";
  byId("edit-said-at").value = memory.said_at ?? "";
  byId("edit-metadata").value = hasMetadata(memory) ? JSON.stringify(memory.metadata) : "";
  byId("edit-error").textContent = "";
  let result = null;
  let saving = null;
  const send = async () => {
    button.disabled = true;
    try {
      const changes = changesOf(memory);
      if (Object.keys(changes).length) result = await save(changes);
      dialog.close("yes");
    } catch (error) {
      byId("edit-error").textContent = error.message;
    } finally {
      button.disabled = false;
    }
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    byId("edit-error").textContent = "";
    saving = send();
  };
  await shown(dialog);
  await saving; // the dialog may have been left while its request was under way
  return result;
}

function changesOf(memory) {
  const now = {
    text: byId("edit-text").value,
    speaker: byId("edit-speaker").value.trim() || null,
    said_at: byId("edit-said-at").value.trim() || null,
    metadata: metadataOf(byId("edit-metadata").value),
  };
  const changed = (name) => JSON.stringify(now[name]) !== JSON.stringify(memory[name] ?? (name === "metadata" ? {} : null));
  return Object.fromEntries(Object.keys(now).filter(changed).map((name) => [name, now[name]]));
}

export const hasMetadata = (memory) => Object.keys(memory.metadata ?? {}).length > 0;

/** Show what became of a memory, oldest first. */
export function showHistory(events) {
  byId("history-list").replaceChildren(...events.map(historyItem));
  return shown(byId("history-dialog"));
}

function historyItem({ event, text, previous_text, at }) {
  const what = event === "ADD" ? "Added" : "Changed";
  return make(
    "li", {},
    make("p", { class: "meta" }, make("strong", {}, what), time(at)),
    previous_text && previous_text !== text ? make("p", { class: "text" }, make("del", {}, previous_text)) : null,
    make("p", { class: "text" }, text),
  );
}
