// Server-sent events, as chat completions stream them.

/** Data of the events in a text that arrives in pieces, cut anywhere. Lines end with LF or CRLF. */
export class EventParser {
  #rest = "";
  #data = [];

  /** The data of all events that this piece completes. */
  feed(piece) {
    const lines = (this.#rest + piece).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const ended of lines) {
      const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}
