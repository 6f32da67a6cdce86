// Elements and words. All text becomes text nodes: nothing on this page is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** An element. `on` among the attributes holds listeners; null and false leave an attribute out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const number = (value) => (typeof value === "number" ? value.toLocaleString("en") : "–");

export const score = (value) => (typeof value === "number" ? value.toFixed(2) : "–");

export function milliseconds(value) {
  if (typeof value !== "number") return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)}\u00a0s`;
  return value < 10 ? `${value.toFixed(1)}\u00a0ms` : `${Math.round(value)}\u00a0ms`;
}

/** `count` things, in words: "1 fact", "2 facts", "2 memories". */
export function counted(count, one, several = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : several}`;
}

/** The beginning of a text, for the names of buttons. */
export function excerpt(text, length = 60) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length).trimEnd()}…` : line;
}

/** Unix time in seconds as an element in the reader's own form of dates. */
export function time(seconds) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return null;
  const words = date.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  return make("time", { datetime: date.toISOString() }, words);
}
