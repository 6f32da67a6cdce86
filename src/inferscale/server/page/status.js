// The line on top: what the memory holds now, and the switch of injection.

import { byId, counted, number } from "./dom.js";
import { report, say } from "./notices.js";

const INTERVAL_MS = 3000;
/** Why nothing can be injected, by what the check at the start found. */
const REFUSALS = {
  refused: "The server's self-check refused injection for this model.",
  off: "The server was started without injection.",
};
const TIMEOUT_MS = 10000;
const NUMBERS = ["facts", "injectable", "pending", "pool"];

/** Asks for the statistics while the page is visible. Dispatches "stats" (with `stats`) and "up" after an outage. */
export class StatusLine extends EventTarget {
  #api;
  #scope;
  #key;
  #timer = 0;
  #round = 0;
  #wasDown = false;
  #mayNotSwitch = false;
  #refusal = "";

  constructor(api, scope, key) {
    super();
    this.#api = api;
    this.#scope = scope;
    this.#key = key;
    document.addEventListener("visibilitychange", () => this.poll());
    key.addEventListener("refused", () => this.#connection("down", "An API key is needed"));
    byId("injection").addEventListener("click", () => this.#switch());
    byId("warm").addEventListener("click", () => this.#warm());
  }

  /** Ask now, then again and again. */
  async poll() {
    clearTimeout(this.#timer);
    const round = ++this.#round;
    if (document.visibilityState !== "visible" || this.#key.isRefused) return;
    try {
      const stats = await this.#api.stats(this.#scope.value, TIMEOUT_MS);
      if (round !== this.#round) return;
      this.#show(stats);
    } catch (error) {
      if (round !== this.#round) return;
      this.#failed(error);
    }
    if (!this.#key.isRefused) this.#timer = setTimeout(() => this.poll(), INTERVAL_MS);
  }

  #show(stats) {
    byId("stat-facts").textContent = number(stats.facts);
    byId("stat-injectable").textContent = number(stats.injectable);
    byId("stat-pending").textContent = number(stats.pending);
    byId("stat-pool").textContent = poolUse(stats.pool ?? {});
    // Without a scope the server does not count what is injectable.
    byId("warm").hidden = !(stats.injection && typeof stats.injectable === "number" && stats.injectable < stats.facts);
    this.#refusal = REFUSALS[stats.self_check?.state] ?? "";
    this.#showInjection(stats.injection);
    this.#isUp();
    this.dispatchEvent(Object.assign(new Event("stats"), { stats }));
  }

  #isUp() {
    this.#connection("up", "Connected");
    if (!this.#wasDown) return;
    this.#wasDown = false;
    say("The server is reachable again.");
    this.dispatchEvent(new Event("up"));
  }

  #failed(error) {
    if (error.status === 401) return;
    if (error.status === 403 && this.#scope.isEmpty) { // a tenant's key, which sees its own scopes only
      for (const name of NUMBERS) byId(`stat-${name}`).textContent = "–";
      byId("injection").disabled = byId("warm").hidden = true;
      this.#isUp();
    } else if (error.status === 0) {
      this.#connection("down", "Server not reachable, trying again");
      if (!this.#wasDown) report(error, "No connection");
      this.#wasDown = true;
    } else {
      const missing = error.status === 404 ? "No memory API at this address" : "The server has a problem";
      this.#connection("down", `${missing}: ${error.message}`);
    }
  }

  #connection(state, text) {
    const line = byId("connection");
    line.dataset.state = state;
    if (line.textContent !== text) line.textContent = text;
    if (state === "down") byId("injection").disabled = true;
  }

  #showInjection(isOn) {
    const button = byId("injection");
    button.setAttribute("aria-checked", String(isOn));
    byId("injection-state").textContent = isOn ? "on" : "off";
    button.disabled = this.#mayNotSwitch || this.#refusal !== "";
    let note = this.#mayNotSwitch ? "This key may not switch injection." : "";
    if (this.#refusal) note = this.#refusal;
    byId("injection-note").textContent = note;
  }

  /** Another key may have other rights. */
  forgetRights() {
    this.#mayNotSwitch = false;
  }

  async #switch() {
    const wanted = byId("injection").getAttribute("aria-checked") !== "true";
    try {
      const { enabled } = await this.#api.setInjection(wanted);
      this.#showInjection(enabled);
      say(enabled ? "Injection is on." : "Injection is off: facts are prefilled as text.");
    } catch (error) {
      if (error.status === 403) {
        this.#mayNotSwitch = true;
        this.#showInjection(!wanted);
      }
      report(error, "Injection was not switched");
    }
    this.poll();
  }

  async #warm() {
    try {
      const { pending } = await this.#api.warm(this.#scope.value);
      byId("injection").focus(); // the button may vanish
      say(`Waiting to be encoded: ${number(pending)}.`);
    } catch (error) {
      report(error, "Encoding was not started");
    }
    this.poll();
  }
}

/** Such as "38 % of 4,096 pages". */
function poolUse(pool) {
  if (typeof pool.pages !== "number" || typeof pool.free_pages !== "number" || !pool.pages) return "–";
  const used = pool.pages - pool.free_pages;
  return `${Math.round((100 * used) / pool.pages)} % of ${counted(pool.pages, "page")}`;
}
