// The coordinator's answers: polled, kept, and told to whoever watches.

const kEvery = 1000;
const kEveryHidden = 5000;
const kDeadline = 5000;
const kKept = 4096;
// Events that a page that opens asks for; one answer has no more.
const kFirst = 512;

export class Fleet {
  constructor(changed) {
    this.changed = changed;
    this.answer = null;
    this.events = [];
    // Of the last answer, on this machine's clock.
    this.heard = 0;
    this.problem = "";
    this.etag = "";
    this.pullId = "";
    this.pull = null;
    // Events that are new since the last change; empty at first, when all of them are.
    this.news = [];
  }

  async run() {
    for (;;) {
      let changed = false;
      try {
        changed = await this.ask();
        this.problem = "";
      } catch (error) {
        this.problem = error instanceof Error ? error.message : String(error);
      }
      try {
        this.changed(changed);
      } catch (error) {
        // A view that fails does not end the others.
        console.error(error);
      }
      await this.pause(document.hidden ? kEveryHidden : kEvery);
    }
  }

  // Ends early at wake().
  pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async get(path) {
    const response = await fetch(path, {cache: "no-cache", signal: AbortSignal.timeout(kDeadline)});
    if (response.ok) return response;
    const said = await response.json().catch(() => ({}));
    throw new Error(said.error || `the coordinator answers ${response.status}`);
  }

  // Returns whether anything is new.
  async ask() {
    const response = await this.get("api/v1/fleet");
    this.heard = Date.now();
    const etag = response.headers.get("ETag") || "";
    let changed = etag === "" || etag !== this.etag;
    if (changed) {
      const answer = await response.json();
      if (this.answer?.term !== answer.term) this.events = [];
      this.answer = answer;
      this.etag = etag;
    }
    this.news = [];
    if (this.answer.leading) {
      changed = (await this.askEvents()) || changed;
      changed = (await this.askPull()) || changed;
    }
    return changed;
  }

  async askEvents() {
    const first = this.events.length === 0;
    const known = first ? Math.max(0, this.answer.last_event - kFirst) : this.events[this.events.length - 1].number;
    if (known >= this.answer.last_event) return false;
    const response = await this.get(`api/v1/events?after=${known}`);
    const answer = await response.json();
    if (answer.term !== this.answer.term) return false;
    if (!first) this.news = answer.events;
    this.events = this.events.concat(answer.events).slice(-kKept);
    return answer.events.length > 0;
  }

  // The pull that somebody looks at.
  async askPull() {
    if (this.pullId === "") return false;
    const before = this.pull;
    const id = this.pullId;
    const response = await this.get(`api/v1/pulls/${encodeURIComponent(id)}`);
    const pull = await response.json();
    // Somebody looks at another one meanwhile.
    if (id !== this.pullId) return true;
    this.pull = pull;
    return this.pull !== null || before !== null;
  }

  look(pullId) {
    this.pullId = pullId;
    this.pull = null;
    this.wake?.();
  }
}
