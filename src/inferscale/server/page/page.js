// Puts the parts of the page together. Everything works with the keyboard and without a network but the server.

import { KeyForm, ScopeForm } from "./access.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Memories } from "./memories.js";
import { StatusLine } from "./status.js";

const api = new Api();
const key = new KeyForm(api);
const scope = new ScopeForm();
const status = new StatusLine(api, scope, key);
const memories = new Memories(api, scope);
const chat = new Chat(api, scope);
let seen = "";

function startOver() {
  status.forgetRights();
  status.poll();
  chat.loadModels();
  memories.start();
}

scope.addEventListener("change", () => {
  seen = "";
  status.poll();
  memories.start();
});
key.addEventListener("change", startOver);
memories.addEventListener("changed", () => status.poll());
chat.addEventListener("stored", () => status.poll());
status.addEventListener("up", () => {
  chat.loadModels();
  memories.load();
});
status.addEventListener("stats", ({ stats }) => {
  const now = `${stats.facts} ${stats.injectable}`;
  if (seen && now !== seen) memories.refresh();
  seen = now;
});
for (const link of document.querySelectorAll(".skip")) {
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the scope
    byId(link.hash.slice(1)).focus();
  });
}
startOver();
