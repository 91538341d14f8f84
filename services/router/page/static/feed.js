// The stream of snapshots: read with fetch, because an EventSource cannot send an API key. A stream that ends or breaks is
// begun again, with a pause that grows; one that falls silent is broken.

const SILENT_MS = 6000;
const FIRST_PAUSE_MS = 400;
const MAX_PAUSE_MS = 5000;

// on: {state(name, why), snapshot(value)}. State: connecting, live, lost, locked (`why`: what the router said).
export class Feed {
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.key = sessionStorage.getItem("baton-key") ?? "";
    this.pause = FIRST_PAUSE_MS;
  }

  useKey(key) {
    this.key = key;
    sessionStorage.setItem("baton-key", key);
    this.run();
  }

  async run() {
    for (;;) {
      let why = "the stream ended";
      try {
        const answer = await this.open();
        if (answer === null) return;
        await this.read(answer.body.getReader());
      } catch (error) {
        why = error.message;
      }
      this.controller?.abort();
      this.on.state("lost", why);
      await new Promise((done) => setTimeout(done, this.pause));
      this.pause = Math.min(MAX_PAUSE_MS, 2 * this.pause);
    }
  }

  // One answer that is no stream; null when there is none.
  async ask(url) {
    const answer = await fetch(url, { headers: this.headers(), cache: "no-store", signal: AbortSignal.timeout(SILENT_MS) });
    return answer.ok ? answer.json() : null;
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  // The answer to read from; null when a key is needed first.
  async open() {
    this.controller = new AbortController();
    this.watch();
    const answer = await fetch(this.url, { headers: this.headers(), signal: this.controller.signal, cache: "no-store" });
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    const why = said.error?.message ?? `the router answers ${answer.status}`;
    if (answer.status !== 401 && answer.status !== 403) throw new Error(why);
    clearTimeout(this.timer);
    this.on.state("locked", this.key || answer.status === 403 ? why : "");
    return null;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.watch();
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        this.pause = FIRST_PAUSE_MS;
        this.on.state("live", "");
        this.on.snapshot(JSON.parse(event.slice(6)));
      }
    }
  }

  watch() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.controller.abort(), SILENT_MS);
  }
}
