/* The strategies side by side: for each a panel with one rank or all, and the wire between them. */

function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

/* Ranks of a panel that are drawn whole: the chosen one, or all; of an execution the one that there is. */
function shownRanks(panel, rank) {
  if (rank === "all") return panel.streams;
  return [panel.streams.find((one) => one.rank === rank) || panel.streams[0]];
}

function streamsOf(world) { return world.panels.flatMap((panel) => panel.streams); }

class Stage {
  constructor(root, data, world, rank) {
    this.data = data;
    this.world = world;
    this.root = root;
    const streams = streamsOf(world);
    world.lineBytes ??= lineBytesOf(streams);
    world.most ??= Math.max(...streams.map((one) => one.peak));
    root.replaceChildren();
    root.style.setProperty("--panels", world.panels.length);
    this.panels = world.panels.map((panel) => this.panel(panel, rank));
  }

  panel(panel, rank) {
    const card = element("article", { class: "panel", style: `--look: ${panel.color}`, "aria-label": panel.label });
    const head = element("h2", {}, panel.label);
    const number = element("span", { class: "now" }), off = element("span", { class: "off" });
    const words = element("p", { class: "module" }), event = element("p", { class: "event" });
    card.append(element("div", { class: "head" }, head, number));
    this.root.append(card);
    if (!panel.streams.length) {
      card.append(element("p", { class: "problem" }, panel.problem || "nothing was recorded"));
      return { panel, card, shown: [] };
    }
    card.append(element("div", { class: "head" }, words, off), event);
    const shown = shownRanks(panel, rank), width = Math.floor(card.clientWidth - 24);
    const others = panel.streams.filter((one) => !shown.includes(one));
    const parts = [];
    const wire = this.wire(panel, width);
    shown.forEach((stream, place) => {
      if (place === 1) card.append(wire.root);
      parts.push(this.rank(card, panel, stream, width));
    });
    if (shown.length === 1) card.append(wire.root);
    const bars = others.map((stream) => this.bar(card, stream, width));
    if (!others.length && shown.length === 1 && this.world.n > 1)
      card.append(element("p", { class: "rest" }, `${(this.world.n - 1).toLocaleString("en-US")} other rank${this.world.n > 2 ? "s" : ""}, not simulated`));
    return { panel, card, number, off, words, event, shown: parts, bars, wire };
  }

  rank(card, panel, stream, width) {
    const name = `${panel.label}, rank ${stream.rank}`;
    const title = element("p", { class: "rank" }, `rank ${stream.rank.toLocaleString("en-US")}`, element("span", { class: "size" }));
    const picture = chart(stream, width, this.world.most, this.data.ticks, `${name}: memory over the step, peak ${bytes(stream.peak)}`);
    const map = blockMap(stream, width, this.world.lineBytes, `${name}: map of memory; arrow keys go from block to block`);
    map.id = `map-${panel.key}-${stream.rank}`.replace(/[^\w-]/g, "_");
    map.blocks.forEach((block, number) => { block.id = `${map.id}-${number}`; });
    map.panel = panel;
    map.stream = stream;
    card.append(title, picture, map);
    const tiers = Object.keys(stream.totals).some((tier) => tier !== DEVICE) ? svg("svg", { class: "tiers", width, height: 42, role: "img" }) : null;
    if (tiers) card.append(tiers);
    return { stream, title, picture, map, tiers, width };
  }

  /* A rank that is not drawn whole: its memory as one bar. */
  bar(card, stream, width) {
    const picture = svg("svg", { class: "rank-bar", width, height: 10, role: "img" });
    const title = element("p", { class: "rank" }, `rank ${stream.rank}`, element("span", { class: "size" }));
    card.append(title, picture);
    return { stream, title, picture, width };
  }

  wire(panel, width) {
    const lane = svg("svg", { class: "wire", width, height: 52, viewBox: `0 0 ${width} 52`, role: "img" });
    const line = element("p", { class: "sent" });
    return { root: element("div", { class: "lane" }, lane, line), lane, line, width, panel };
  }

  show(tick, playing) {
    for (const one of this.panels) if (one.shown.length) this.showPanel(one, tick, playing);
    this.compare();
    this.showBoard(tick);
  }

  /* All strategies as one bar each, for screens on which the panels do not stand side by side. */
  showBoard(tick) {
    const root = document.getElementById("board"), width = Math.max(60, root.clientWidth - 150);
    root.replaceChildren(...this.panels.filter((one) => one.shown.length).map((one) => {
      const stream = one.shown[0].stream, picture = svg("svg", { width, height: 12 });
      this.stack(picture, stream.parts(DEVICE, stream.at(tick)), width, 12);
      const row = element("button", { type: "button", title: `To ${one.panel.label}` }, element("span", {}, one.panel.label), picture, element("b", {}, bytes(one.size)));
      row.addEventListener("click", () => one.card.scrollIntoView({ inline: "center", block: "nearest" }));
      return row;
    }));
  }

  showPanel(one, tick, playing) {
    const fresh = tick - FLASH;
    const first = one.shown[0].stream, event = first.at(tick);
    one.size = first.sum(DEVICE, event);
    one.number.textContent = bytes(one.size);
    one.number.dataset.bytes = one.size;
    one.number.title = exact(one.size);
    one.words.textContent = moduleAt(first, event);
    one.event.textContent = says(first, playing ? telling(first, event, fresh < 0 ? 0 : first.at(fresh)) : event);
    for (const { stream, title, picture, map, tiers, width } of one.shown) {
      const at = stream.at(tick), before = fresh < 0 ? firstShown(stream) : stream.at(fresh);
      this.sized(title, stream, at);
      picture.place(tick);
      showBlocks(map, at, before);
      showUnits(map, stream, at, before);
      if (tiers) drawTiers(tiers, width, stream, at, before);
    }
    for (const bar of one.bars) this.showBar(bar, bar.stream.at(tick));
    this.showWire(one, tick);
  }

  sized(title, stream, event) {
    const size = title.querySelector(".size");
    size.textContent = `${bytes(stream.sum(DEVICE, event))} · event ${event.toLocaleString("en-US")}`;
    size.dataset.bytes = stream.sum(DEVICE, event);
    size.dataset.event = event;
    size.dataset.rank = stream.rank;
  }

  showBar({ stream, title, picture, width }, event) {
    this.sized(title, stream, event);
    picture.replaceChildren();
    this.stack(picture, stream.parts(DEVICE, event), width, 10);
    picture.setAttribute("aria-label", `rank ${stream.rank}: ${bytes(stream.sum(DEVICE, event))}`);
  }

  stack(picture, parts, width, height) {
    let x = 0;
    for (const [place, size] of parts.entries()) {
      const long = (size / this.world.most) * width;
      if (size) svg("rect", { x, y: 0, width: long, height, fill: `url(#f${place})`, class: `block c${place}` }, picture);
      x += long;
    }
  }

  showWire(one, tick) {
    const { lane, line, width, panel } = one.wire, stream = one.shown[0].stream, event = stream.at(tick);
    const flying = stream.inFlight(event, tick), most = stream.sent(stream.length - 1), sent = stream.sent(event);
    const words = flying.map((each) => `${spoken(each.collective)} ${each.unit} ${exact(stream.launched(each, "bytes", event))}`).join("; ") || "nothing in flight";
    if (lane.words !== words) this.drawWire(lane, width, flying, panel, stream, event);
    lane.words = words;
    lane.setAttribute("aria-label", `between the ranks: ${words}`);
    line.replaceChildren(element("span", { class: "sent-bar", style: `--part: ${most ? sent / most : 0}` }), `sent ${bytes(sent)} of ${bytes(most)}`);
    line.dataset.bytes = sent;
    line.title = `${exact(sent)} of ${exact(most)} by rank ${stream.rank}`;
  }

  drawWire(lane, width, flying, panel, stream, event) {
    lane.replaceChildren();
    svg("line", { x1: 0, x2: width, y1: 26, y2: 26, class: "idle" }, lane);
    if (!flying.length) {
      svg("rect", { x: width / 2 - 52, y: 16, width: 104, height: 20, class: "gap" }, lane);
      text(lane, width / 2, 30, "nothing in flight", { class: "quiet" });
    }
    const shown = flying.slice(-2), room = width / Math.max(1, shown.length);
    shown.forEach((one, place) => {
      const group = this.drawFlight(lane, one, stream.launched(one, "bytes", event), place * room, room, place ? 0 : flying.length - shown.length);
      group.facts = () => factsOfOperation(panel, stream, one, stream.at(Number(document.getElementById("scrub").value)));
    });
  }

  drawFlight(lane, one, sum, left, room, more) {
    const group = svg("g", { class: `flight ${one.wait < 0 ? "issued" : ""}` }, lane), middle = left + room / 2;
    const ranks = one.ranks && one.ranks !== this.world.n ? ` among ${one.ranks}` : "";
    const name = `${spoken(one.collective)}${one.unit ? ` · ${one.unit}` : ""}`;
    const size = `${bytes(sum)}${ranks}${one.wait < 0 ? ", launched" : ""}${more ? ` (+${more})` : ""}`;
    for (let x = left + 9, turn = 0; x < left + room - 5; x += 17, turn++)
      svg("path", { d: turn % 2 ? `M${x},50V4M${x - 3.5},9L${x},3L${x + 3.5},9` : `M${x},2V48M${x - 3.5},43L${x},49L${x + 3.5},43`, class: "arrow" }, group);
    const long = Math.min(room - 4, 18 + 6.4 * Math.max(name.length, size.length));
    const pill = svg("rect", { x: middle - long / 2, y: 11, width: long, height: 31, rx: 8, class: "pill" }, group);
    pill.dataset.bytes = sum;
    text(group, middle, 24, name, { class: "pill-words" });
    text(group, middle, 37, size, { class: "pill-words size" });
    return group;
  }

  /* Beside each strategy's bytes: how they compare with those of the first at the same place. */
  compare() {
    const first = this.panels.find((one) => one.shown.length);
    for (const one of this.panels) {
      if (!one.shown.length) continue;
      const share = first.size ? one.size / first.size : 1;
      one.off.textContent = one === first ? "" : `${(100 * share).toFixed(0)} % of ${first.panel.label}`;
    }
  }
}
