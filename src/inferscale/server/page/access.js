// The two forms on top: whose memory is shown, and the API key.

import { byId } from "./dom.js";
import { clearWarning } from "./notices.js";

const FIELDS = ["user_id", "agent_id", "run_id"];
const WORDS = { user_id: "user", agent_id: "agent", run_id: "run" };
const KEY_ITEM = "inferscale.key";

/** The scope that is shown. It stands in the address behind #, which no server sees. Dispatches "change". */
export class ScopeForm extends EventTarget {
  value = {};

  constructor() {
    super();
    this.#readAddress();
    addEventListener("hashchange", () => this.#readAddress());
    byId("scope-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const given = FIELDS.map((name) => [name, byId(name).value.trim()]).filter(([, value]) => value);
      const hash = new URLSearchParams(given).toString();
      if (hash === location.hash.slice(1)) this.dispatchEvent(new Event("change")); // show it afresh
      else location.hash = hash;
    });
  }

  get isEmpty() {
    return Object.keys(this.value).length === 0;
  }

  /** Such as "user ana, run 7". */
  get words() {
    return Object.entries(this.value).map(([name, value]) => `${WORDS[name]} ${value}`).join(", ");
  }

  ask() {
    byId("user_id").focus();
  }

  #readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    this.value = {};
    for (const name of FIELDS) {
      const value = given.get(name)?.trim() ?? "";
      byId(name).value = value;
      if (value) this.value[name] = value;
    }
    this.dispatchEvent(new Event("change"));
  }
}

/** The API key: kept by this tab only, and asked for when an answer is 401. Dispatches "change". */
export class KeyForm extends EventTarget {
  #api;

  constructor(api) {
    super();
    this.#api = api;
    this.#use(sessionStorage.getItem(KEY_ITEM) ?? "");
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      if (!/^[\x21-\x7e]*$/.test(key)) return this.#note("A key has no spaces and no letters beyond ASCII.", true);
      this.#use(key);
      this.dispatchEvent(new Event("change"));
    });
    byId("forget-key").addEventListener("click", () => {
      this.#use("");
      byId("key").focus();
      this.dispatchEvent(new Event("change"));
    });
    api.addEventListener("unauthorized", () => this.#ask());
  }

  /** Whether the server has refused what it was given, so that asking again is useless. */
  isRefused = false;

  #use(key) {
    this.#api.key = key;
    this.isRefused = false;
    if (key) sessionStorage.setItem(KEY_ITEM, key);
    else sessionStorage.removeItem(KEY_ITEM);
    byId("key").value = "";
    byId("key").placeholder = key ? "in use" : "";
    byId("forget-key").hidden = !key;
    this.#note(key ? "A key is in use. It is kept until this tab is closed."
      : "Needed where the server was started with keys. Kept until this tab is closed.");
  }

  #ask() {
    if (this.isRefused) return;
    this.isRefused = true;
    clearWarning();
    this.#note(this.#api.key ? "The server does not accept this key. Enter another one."
      : "The server wants an API key. Enter one.", true);
    byId("key").focus();
    this.dispatchEvent(new Event("refused"));
  }

  #note(text, isError = false) {
    const note = byId("key-note");
    note.textContent = text;
    note.className = isError ? "error" : "note";
    note.setAttribute("role", isError ? "alert" : "note");
    byId("key").setAttribute("aria-invalid", String(isError));
  }
}
