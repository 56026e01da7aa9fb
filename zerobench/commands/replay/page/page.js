/* Controls: the cursor, play, the rank, N, the legend, keys, the card on what the pointer or the focus is on. */

const STEP_SECONDS = 40; /* of a step played at 1x */
const ordered = (ticks) => [...new Set(ticks)].sort((a, b) => a - b);
const get = (id) => document.getElementById(id);

class Page {
  constructor(data) {
    this.data = data;
    this.tick = 0;
    this.rank = null;
    for (const world of data.worlds)
      for (const panel of world.panels) panel.packed = panel.streams;
    fills(data.categories);
    this.legend();
    this.listen();
    get("n").max = data.worlds.length - 1;
    get("n").disabled = data.worlds.length < 2;
    get("scrub").max = data.ticks;
    this.choose(Math.max(0, data.worlds.findIndex((world) => world.how === "measured")));
    this.provenance();
  }

  /* Goes to a world; its streams are read when it is first shown. */
  choose(place) {
    const world = this.data.worlds[place];
    for (const panel of world.panels) {
      if (panel.packed) panel.streams = panel.packed.map((one) => new Stream(one, this.data));
      panel.packed = null;
    }
    this.place = place;
    this.world = world;
    get("n").value = place;
    get("n").setAttribute("aria-valuetext", `${world.n} ranks, ${world.how}`);
    get("n-out").replaceChildren(element("b", {}, world.n.toLocaleString("en-US")), element("span", { class: `how ${world.how}` }, world.how));
    this.ranks();
    this.phases();
    this.figure();
    scaleTable(get("scale-table"), world);
    this.build();
  }

  /* The figure against N, of the column that is chosen. */
  figure() {
    this.of ??= "peak_bytes";
    get("of").replaceChildren(...Object.entries(FIGURES).map(([column, words]) => {
      const made = element("button", { type: "button", "aria-pressed": column === this.of }, words);
      made.addEventListener("click", () => { this.of = column; this.figure(); get("of").querySelector("[aria-pressed=true]").focus(); });
      return made;
    }));
    const several = this.data.worlds.length > 1;
    if (several) scaleFigure(get("scale-figure"), this.data, this.world, this.of);
    else get("scale-title").textContent = "The step in numbers";
    for (const part of [get("of"), get("scale-figure")]) part.hidden = !several;
    get("scale-figure").parentNode.classList.toggle("alone", !several);
  }

  build() {
    this.stage = new Stage(get("stage"), this.data, this.world, this.rank);
    const streams = streamsOf(this.world), ends = (one) => (one.wait < 0 ? [one.from] : [one.from, one.wait]);
    this.stops = ordered(streams.flatMap((stream) => [...stream.tick.slice(firstShown(stream))]));
    this.collectives = ordered(streams.flatMap((stream) => stream.operations.flatMap(ends).map((event) => stream.tick[event])));
    this.hide();
    this.go(this.tick);
  }

  ranks() {
    const found = [...new Set(streamsOf(this.world).map((stream) => stream.rank))].sort((a, b) => a - b);
    const all = this.world.how === "measured" && found.length > 1;
    const choices = all ? [...found, "all"] : ["fullest"];
    if (!choices.includes(this.rank)) this.rank = choices[0];
    get("ranks").replaceChildren(...choices.map((rank) => {
      const words = rank === "all" ? "all ranks" : rank === "fullest" ? "fullest rank" : `rank ${rank}`;
      const on = rank === this.rank;
      const made = element("button", { type: "button", role: "radio", "aria-checked": on, tabindex: on ? 0 : -1, "data-rank": rank }, words);
      made.addEventListener("click", () => { this.rank = rank; this.ranks(); this.build(); get("ranks").querySelector("[aria-checked=true]").focus(); });
      return made;
    }));
  }

  phases() {
    const root = get("phases"), list = this.world.phases;
    root.replaceChildren(...list.map(([name, from], place) => {
      const to = place + 1 < list.length ? list[place + 1][1] : this.data.ticks;
      const made = element("span", { class: `phase ${name}`, style: `left:${(100 * from) / this.data.ticks}%;width:${(100 * (to - from)) / this.data.ticks}%` });
      if (to - from > 0.05 * this.data.ticks) made.textContent = name;
      return made;
    }));
  }

  go(tick) {
    this.tick = Math.max(0, Math.min(this.data.ticks, Math.round(tick)));
    get("scrub").value = this.tick;
    const phase = this.world.phases.filter(([, from]) => from <= this.tick).at(-1);
    get("scrub").setAttribute("aria-valuetext", `${phase ? phase[0] : "the beginning"}, ${(100 * this.tick / this.data.ticks).toFixed(0)} % of the step`);
    get("where").textContent = `${phase ? phase[0] : ""} · ${(100 * this.tick / this.data.ticks).toFixed(1)} % of the events`;
    this.stage.show(this.tick, Boolean(this.playing));
  }

  /* To the next or previous of a sorted list of ticks. */
  jump(list, forward) {
    this.pause();
    const found = forward ? list.find((tick) => tick > this.tick) : list.findLast((tick) => tick < this.tick);
    this.go(found ?? (forward ? this.data.ticks : 0));
  }

  toggle() { if (this.playing) this.pause(); else this.play(); }

  play() {
    if (this.tick >= this.data.ticks) this.go(0);
    let last = performance.now(), at = this.tick;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const frame = (now) => {
      if (!this.playing) return;
      at += ((now - last) / 1000) * (this.data.ticks / STEP_SECONDS) * get("speed").value;
      last = now;
      if (!still || at - this.tick > this.data.ticks / 40) this.go(at);
      if (at >= this.data.ticks) { this.go(this.data.ticks); this.pause(); }
      else this.playing = requestAnimationFrame(frame);
    };
    this.playing = requestAnimationFrame(frame);
    this.button(true);
  }

  pause() {
    cancelAnimationFrame(this.playing);
    this.playing = 0;
    this.button(false);
    if (this.stage) this.stage.show(this.tick, false);
  }

  button(on) {
    get("play-word").textContent = on ? "Pause" : "Play";
    get("play").setAttribute("aria-pressed", on);
    get("play").setAttribute("aria-label", on ? "Pause (space)" : "Play (space)");
  }

  legend() {
    for (const [place, one] of this.data.categories.entries()) {
      const sample = svg("svg", { width: 22, height: 14, "aria-hidden": "true" });
      svg("rect", { width: 22, height: 14, rx: 3, fill: `url(#f${place})` }, sample);
      const made = element("button", { type: "button", "aria-pressed": "false" }, sample, one.name);
      made.addEventListener("click", () => {
        const on = document.body.dataset.only === String(place);
        if (on) delete document.body.dataset.only; else document.body.dataset.only = place;
        for (const other of get("legend").children) other.setAttribute("aria-pressed", other === made && !on);
      });
      get("legend").append(made);
    }
  }

  listen() {
    get("play").addEventListener("click", () => this.toggle());
    get("first").addEventListener("click", () => { this.pause(); this.go(0); });
    get("back").addEventListener("click", () => this.jump(this.stops, false));
    get("next").addEventListener("click", () => this.jump(this.stops, true));
    get("scrub").addEventListener("input", (event) => { this.pause(); this.go(Number(event.target.value)); });
    get("n").addEventListener("input", (event) => this.choose(Number(event.target.value)));
    document.addEventListener("keydown", (event) => this.key(event));
    const stage = get("stage");
    stage.addEventListener("pointerover", (event) => this.point(event.target, event));
    stage.addEventListener("pointerleave", () => this.hide());
    stage.addEventListener("click", (event) => this.point(event.target, event));
    for (const name of ["pointerdown", "pointermove"]) stage.addEventListener(name, (event) => this.scrubChart(event));
    stage.addEventListener("focusout", () => this.hide());
    let wide = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; this.choose(this.place); } });
  }

  /* A chart is a scrubber too. */
  scrubChart(event) {
    const chart = event.target.closest(".chart");
    if (!chart || !event.buttons) return;
    const box = chart.getBoundingClientRect();
    this.pause();
    this.go(((event.clientX - box.left) / box.width) * this.data.ticks);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const focus = document.activeElement, key = event.key;
    if (focus && focus.classList.contains("map") && this.inMap(focus, key)) { event.preventDefault(); return; }
    if (focus && focus.closest("#ranks") && key.startsWith("Arrow")) { this.turn(key === "ArrowRight" || key === "ArrowDown"); event.preventDefault(); return; }
    if (focus && (focus.id === "n" || focus.id === "speed")) return;
    if (key === " " && focus && (focus.tagName === "BUTTON" || focus.tagName === "SUMMARY")) return;
    const phases = this.world.phases.map(([, from]) => from);
    const acts = {
      " ": () => this.toggle(),
      ArrowRight: () => this.jump(event.shiftKey ? this.collectives : this.stops, true),
      ArrowLeft: () => this.jump(event.shiftKey ? this.collectives : this.stops, false),
      PageDown: () => this.jump(phases, true), PageUp: () => this.jump(phases, false),
      Home: () => { this.pause(); this.go(0); }, End: () => { this.pause(); this.go(this.data.ticks); },
      Escape: () => this.hide(),
    };
    if (acts[key]) { acts[key](); event.preventDefault(); }
  }

  turn(forward) {
    const all = [...get("ranks").children], at = all.findIndex((one) => one.getAttribute("aria-checked") === "true");
    all[(at + (forward ? 1 : all.length - 1)) % all.length].click();
  }

  /* Arrow keys within a map: along a row, and to the nearest block of the row above or below. */
  inMap(map, key) {
    const alive = map.blocks.filter((block) => block.shown).map((block) => ({ block, x: Number(block.getAttribute("x")), y: Number(block.getAttribute("y")) }));
    if (key === "Escape") { map.blur(); return true; }
    if (!key.startsWith("Arrow") || !alive.length) return false;
    const old = alive.find((one) => one.block === this.active) || alive[0];
    const far = { ArrowRight: (a) => a.y === old.y && a.x > old.x && a.x - old.x, ArrowLeft: (a) => a.y === old.y && a.x < old.x && old.x - a.x,
      ArrowDown: (a) => a.y > old.y && (a.y - old.y) * 1e3 + Math.abs(a.x - old.x), ArrowUp: (a) => a.y < old.y && (old.y - a.y) * 1e3 + Math.abs(a.x - old.x) }[key];
    const best = this.active ? alive.filter((one) => far(one) !== false).sort((a, b) => far(a) - far(b))[0] || old : old;
    map.setAttribute("aria-activedescendant", best.block.id);
    this.point(best.block);
    return true;
  }

  /* Shows the card on a block or a collective. */
  point(target, pointer) {
    const flight = target.closest && target.closest(".flight");
    if (flight) return this.card(flight, flight.facts(), pointer);
    if (!target.classList || !target.classList.contains("block") || !target.spell) return this.hide();
    const map = target.closest(".map"), event = map.stream.at(this.tick);
    return this.card(target, factsOf(map.panel, map.stream, target.spell, event), pointer);
  }

  card(target, facts, pointer) {
    if (this.active && this.active !== target) this.active.classList.remove("active");
    this.active = target;
    target.classList.add("active");
    target.setAttribute("aria-label", facts.map(([name, value]) => `${name}: ${value}`).join("; "));
    target.setAttribute("role", "img");
    const card = get("card"), box = target.getBoundingClientRect();
    card.replaceChildren(element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    card.hidden = false;
    const x = pointer ? pointer.clientX : box.left, y = pointer ? pointer.clientY : box.bottom;
    const { width, height } = card.getBoundingClientRect();
    card.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, x + 14))}px`;
    card.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 14) : y + 18}px`;
  }

  hide() {
    if (this.active) this.active.classList.remove("active");
    this.active = null;
    get("card").hidden = true;
  }

  provenance() {
    const runs = this.data.worlds.flatMap((world) => world.panels).filter((panel) => panel.run_id);
    get("scale-words").textContent = this.data.scale_words;
    get("provenance").append(...runs.map((panel) => {
      const words = ` commit ${(panel.commit || "unknown").slice(0, 10)}, torch ${panel.torch_version}`;
      return element("p", {}, element("b", {}, panel.run_id), words, element("br"), element("code", {}, panel.command));
    }));
  }
}

inflate(get("data").textContent).then((data) => { window.replay = new Page(data); document.body.dataset.ready = "yes"; });
