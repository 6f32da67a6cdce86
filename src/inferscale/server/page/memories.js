// The memories of a scope: pages, search, adding, changing and forgetting.

import { ApiError } from "./api.js";
import { confirmed, edited, showHistory } from "./dialogs.js";
import { byId, counted, excerpt, number } from "./dom.js";
import { memoryItem, showInjectable } from "./memory-item.js";
import { report, say, warn } from "./notices.js";
import { metadataOf } from "./fields.js";

const PAGE_SIZE = 20;
const NUM_RESULTS = 20;

/** Dispatches "changed" whenever something was stored or forgotten. */
export class Memories extends EventTarget {
  #api;
  #scope;
  #query = ""; // of the search that is shown; "" while browsing
  #cursors = [null]; // one for each page up to the one that is shown
  #next = null;
  #fresh = []; // added here and not yet seen on a page
  #turn = 0;
  #actions = {
    edit: (memory) => this.#edit(memory),
    history: (memory) => this.#history(memory),
    remove: (memory) => this.#remove(memory),
  };

  constructor(api, scope) {
    super();
    this.#api = api;
    this.#scope = scope;
    byId("add-form").addEventListener("submit", (event) => this.#add(event));
    byId("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#search(byId("query").value.trim());
    });
    byId("show-all").addEventListener("click", () => this.#search(""));
    byId("next").addEventListener("click", () => this.#turnPage([...this.#cursors, this.#next]));
    byId("previous").addEventListener("click", () => this.#turnPage(this.#cursors.slice(0, -1)));
    byId("delete-all").addEventListener("click", () => this.#removeAll());
  }

  /** Another scope or another key: begin with its first page. */
  start() {
    this.#query = "";
    byId("query").value = "";
    this.#cursors = [null];
    this.#fresh = [];
    return this.load();
  }

  /** Fetch what is shown now and show it; the answer says whether that worked. */
  async load() {
    const turn = ++this.#turn;
    if (this.#scope.isEmpty) {
      this.#show([], "Name a user, an agent or a run above to see its memories.");
      return true;
    }
    const list = byId("list");
    list.setAttribute("aria-busy", "true");
    try {
      const page = await this.#fetch();
      if (turn !== this.#turn) return false;
      this.#next = page.has_more ? page.next_cursor : null;
      this.#show(page.data, this.#query ? "Nothing was found." : `Nothing is stored for ${this.#scope.words} yet.`);
      return true;
    } catch (error) {
      if (turn !== this.#turn) return false;
      this.#next = null;
      this.#show([], error.status === 401 ? "An API key is needed to see these memories." : "The memories could not be loaded.");
      report(error, "The memories could not be loaded");
      return false;
    } finally {
      if (turn === this.#turn) list.removeAttribute("aria-busy");
    }
  }

  /** Something changed on the server. Nothing moves under a person's hands: there, only the badges follow. */
  async refresh() {
    if (this.#scope.isEmpty || document.querySelector("dialog[open]")) return;
    if (!byId("list").contains(document.activeElement)) {
      await this.load();
      return;
    }
    const turn = this.#turn;
    const page = await this.#fetch().catch(() => ({ data: [] })); // the status line tells of outages
    if (turn !== this.#turn) return;
    for (const memory of page.data) {
      const item = this.#item(memory.id);
      if (item) showInjectable(item, memory.injectable);
    }
  }

  #fetch() {
    if (this.#query) return this.#api.search({ ...this.#scope.value, query: this.#query, top_k: NUM_RESULTS });
    return this.#api.list(this.#scope.value, { limit: PAGE_SIZE, after: this.#cursors.at(-1) });
  }

  #show(memories, ifEmpty) {
    const onPage = new Set(memories.map((memory) => memory.id));
    const freshIds = new Set(this.#fresh.map((memory) => memory.id));
    const elsewhere = this.#query ? [] : this.#fresh.filter((memory) => !onPage.has(memory.id));
    const all = [...elsewhere, ...memories];
    byId("list").replaceChildren(...all.map((memory) => this.#element(memory, freshIds.has(memory.id))));
    byId("list-note").textContent = all.length ? "" : ifEmpty;
    byId("list-heading").textContent = this.#query ? `Found for “${this.#query}”`
      : this.#scope.isEmpty ? "No scope chosen" : `Memories of ${this.#scope.words}`;
    byId("show-all").hidden = !this.#query;
    byId("delete-all").hidden = this.#scope.isEmpty || Boolean(this.#query) || !all.length;
    const first = (this.#cursors.length - 1) * PAGE_SIZE;
    byId("paging").hidden = Boolean(this.#query) || !(this.#next || this.#cursors.length > 1);
    byId("previous").disabled = this.#cursors.length === 1;
    byId("next").disabled = !this.#next;
    byId("range").textContent = memories.length ? `${number(first + 1)} to ${number(first + memories.length)}` : "";
  }

  async #turnPage(cursors) {
    this.#cursors = cursors;
    this.#fresh = [];
    if (!(await this.load())) return;
    say(`Memories ${byId("range").textContent}`);
    byId("list-heading").focus();
  }

  async #search(query) {
    if (query && this.#scope.isEmpty) return this.#askForScope();
    const hadFocus = document.activeElement === byId("show-all");
    this.#query = query;
    if (!query) byId("query").value = "";
    if (!(await this.load())) return;
    if (hadFocus) byId("query").focus(); // "Show all" has just gone
    const found = byId("list").childElementCount;
    say(query ? `${counted(found, "memory", "memories")} found for “${excerpt(query)}”.` : "All memories are shown.");
  }

  async #add(event) {
    event.preventDefault();
    if (this.#scope.isEmpty) return this.#askForScope();
    const button = event.submitter ?? byId("add-form").querySelector("[type=submit]");
    button.disabled = true;
    try {
      const { data, pending } = await this.#api.add({ ...this.#scope.value, ...newMemories() });
      byId("add-text").value = "";
      byId("add-text").focus();
      this.#fresh = [...data, ...this.#fresh];
      this.#query = "";
      byId("query").value = "";
      await this.load();
      say(`${counted(data.length, "memory", "memories")} stored. Waiting to be encoded: ${number(pending)}.`);
      this.#changed();
    } catch (error) {
      if (error instanceof ApiError) report(error, "Nothing was stored");
      else warn(error.message);
    } finally {
      button.disabled = false;
    }
  }

  async #edit(memory) {
    const updated = await edited(memory, (changes) => this.#api.update(memory.id, changes));
    if (!updated) return;
    const known = this.#fresh.some((fresh) => fresh.id === memory.id);
    this.#fresh = this.#fresh.map((fresh) => (fresh.id === memory.id ? updated : fresh));
    const item = this.#element("score" in memory ? { ...updated, score: memory.score } : updated, known);
    this.#item(memory.id)?.replaceWith(item);
    item.querySelector("[data-action=edit]").focus();
    say("The memory was changed.");
    this.#changed();
  }

  async #history(memory) {
    try {
      const { data } = await this.#api.history(memory.id);
      await showHistory(data);
    } catch (error) {
      this.#failed(error, memory, "The history could not be loaded");
    }
  }

  async #remove(memory) {
    if (!(await confirmed({ title: "Delete this memory?", text: memory.text, action: "Delete" }))) return;
    try {
      await this.#api.remove(memory.id);
      this.#drop(memory);
      say("The memory was deleted.");
      this.#changed();
    } catch (error) {
      this.#failed(error, memory, "The memory was not deleted");
    }
  }

  async #removeAll() {
    const text = `Every memory of ${this.#scope.words} is deleted, with its history, on all pages.`;
    if (!(await confirmed({ title: "Delete all memories of this scope?", text, action: "Delete all" }))) return;
    try {
      const { deleted } = await this.#api.removeAll(this.#scope.value);
      this.#cursors = [null];
      this.#fresh = [];
      await this.load();
      byId("list-heading").focus();
      say(`${counted(deleted, "memory", "memories")} deleted.`);
      this.#changed();
    } catch (error) {
      report(error, "The memories were not deleted");
    }
  }

  /** Someone else may have deleted it. */
  #failed(error, memory, doing) {
    if (error.status === 404) {
      this.#drop(memory);
      warn("This memory no longer exists.");
      this.#changed();
    } else {
      report(error, doing);
    }
  }

  /** Take it out of the list; the focus goes to what now stands in its place. */
  #drop(memory) {
    this.#fresh = this.#fresh.filter((fresh) => fresh.id !== memory.id);
    const item = this.#item(memory.id);
    if (!item) return;
    const neighbour = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    (neighbour?.querySelector("[data-action=delete]") ?? byId("list-heading")).focus();
    if (neighbour || this.#query) return;
    this.#cursors = this.#cursors.length > 1 ? this.#cursors.slice(0, -1) : [null];
    this.load();
  }

  #element(memory, isFresh) {
    return memoryItem(memory, this.#actions, { scope: this.#scope.value, isFresh });
  }

  #item(id) {
    return byId("list").querySelector(`[data-id="${CSS.escape(id)}"]`);
  }

  #askForScope() {
    warn("Name a user, an agent or a run first.");
    this.#scope.ask();
  }

  #changed() {
    this.dispatchEvent(new Event("changed"));
  }
}

/** What stands in the form, as the API takes it. */
function newMemories() {
  const text = byId("add-text").value.trim();
  const about = {};
  const speaker = byId("add-speaker").value.trim();
  const saidAt = byId("add-said-at").value.trim();
  const metadata = metadataOf(byId("add-metadata").value);
  if (speaker) about.speaker = speaker;
  if (saidAt) about.said_at = saidAt;
  if (Object.keys(metadata).length) about.metadata = metadata;
  if (!byId("add-lines").checked) return { text, ...about };
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return { items: lines.map((line) => ({ text: line })), ...about };
}
