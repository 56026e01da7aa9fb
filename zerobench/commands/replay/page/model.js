/* The recorded events as tables: what the page's packed data mean.
   stream      columns of numbers per event of one rank; words are places in `strings`
   spell       one storage at one size: it is there after the events [from, to)
   operation   one collective: from its first launch until its wait has returned, or no wait was recorded (wait = -1) */

const DEVICE = "device";

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

class Stream {
  constructor(packed, data) {
    this.rank = packed.rank;
    this.length = packed.length;
    this.data = data;
    this.columns = packed.columns;
    this.tick = running(packed.columns.tick, this.length);
    this.us = running(packed.columns.us, this.length);
    this.places = new Map(data.categories.map((one, place) => [one.name, place]));
    this.replay();
  }

  number(column, event) { return this.columns[column] ? this.columns[column][event] : 0; }

  word(column, event) { return this.data.strings[this.number(column, event)]; }

  /* Live bytes by tier and category after each event, spells and operations. */
  replay() {
    this.totals = {};
    this.spells = [];
    this.operations = [];
    const open = new Map(), operations = new Map();
    for (let event = 0; event < this.length; event++) {
      const kind = this.word("kind", event);
      if (kind === "live" || kind === "birth" || kind === "free" || kind === "label") this.change(kind, event, open);
      else if (kind === "launch") this.launch(event, operations);
      else if (kind === "wait") {
        const one = operations.get(this.number("operation", event));
        if (one && one.wait < 0) one.wait = event;
      }
    }
    for (const spell of open.values()) this.spells.push(spell);
    this.spells.sort((a, b) => a.from - b.from || a.order - b.order);
    for (const sums of Object.values(this.totals)) for (const one of sums) accumulate(one);
  }

  change(kind, event, open) {
    const storage = this.number("storage", event), size = this.number("bytes", event);
    const category = this.places.get(this.word("category", event)), tier = this.word("tier", event) || DEVICE;
    const sums = this.totals[tier] ??= this.data.categories.map(() => new Float64Array(this.length));
    const before = open.get(storage);
    if (kind === "label") {
      sums[this.places.get(this.word("previous", event))][event] -= size;
      sums[category][event] += size;
      if (before) before.categories.push([event, category]);
      return;
    }
    const grown = kind === "free" ? -size : size;
    sums[category][event] += grown;
    if (before) { before.to = event; this.spells.push(before); open.delete(storage); }
    const bytes = (before ? before.bytes : 0) + grown;
    if (bytes > 0) {
      const made = before ? before.made : event;
      open.set(storage, { storage, tier, bytes, from: event, to: Infinity, made, order: storage, categories: [[event, category]] });
    }
  }

  launch(event, operations) {
    const number = this.number("operation", event);
    let one = operations.get(number);
    if (!one) {
      one = { from: event, wait: -1, launches: [], control: this.number("control", event),
        collective: this.word("collective", event), unit: this.word("unit", event), ranks: this.number("group_size", event) };
      operations.set(number, one);
      this.operations.push(one);
    }
    one.launches.push(event);
    one.last = event;
  }

  /* The sum of a column over what an operation has launched by an event. */
  launched(one, column, event) {
    return one.launches.filter((at) => at <= event).reduce((sum, at) => sum + this.number(column, at), 0);
  }

  /* The last event at or before a tick; the state is that after it. */
  at(tick) {
    let low = 0, high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tick[middle] <= tick) low = middle; else high = middle - 1;
    }
    return low;
  }

  parts(tier, event) { return (this.totals[tier] || []).map((sums) => sums[event]); }

  sum(tier, event) { return this.parts(tier, event).reduce((a, b) => a + b, 0); }

  get peak() {
    this._peak ??= this.highest();
    return this._peak;
  }

  highest() {
    let best = 0;
    for (let event = 0; event < this.length; event++) if (this.word("kind", event) !== "live") best = Math.max(best, this.sum(DEVICE, event));
    return best;
  }

  /* Bytes that this rank has sent by an event; control traffic apart. */
  sent(event) {
    this._sent ??= this.sending();
    return this._sent[event];
  }

  sending() {
    const sums = new Float64Array(this.length);
    for (let event = 0; event < this.length; event++)
      if (this.word("kind", event) === "launch" && !this.number("control", event)) sums[event] = this.number("wire_bytes", event);
    return accumulate(sums);
  }

  /* Bytes moved between tiers by an event, by direction; and the last move since another event. */
  moved(event, since) {
    const sums = {};
    let last = null;
    for (let at = 0; at <= event; at++) {
      if (this.word("kind", at) !== "move") continue;
      const way = this.word("collective", at);
      sums[way] = (sums[way] || 0) + this.number("bytes", at);
      if (at > since) last = { way, bytes: this.number("bytes", at), name: this.word("name", at) };
    }
    return { sums, last };
  }

  /* Collectives in flight after an event; without a recorded wait for a short way after the launch. */
  inFlight(event, tick) {
    return this.operations.filter((one) => one.from <= event &&
      (one.wait >= 0 ? event < one.wait : tick - this.tick[one.last] <= FLASH));
  }
}

const FLASH = 150;

function running(steps, length) {
  const sums = new Float64Array(length);
  let sum = 0;
  for (let place = 0; place < length; place++) sums[place] = sum += steps ? steps[place] : 0;
  return sums;
}

function accumulate(sums) {
  for (let place = 1; place < sums.length; place++) sums[place] += sums[place - 1];
  return sums;
}

function categoryAt(spell, event) {
  let found = spell.categories[0][1];
  for (const [from, category] of spell.categories) if (from <= event) found = category;
  return found;
}
