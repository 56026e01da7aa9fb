/* Pictures of a stream in SVG: memory over the step, the map of blocks, the wire. */

const SVG = "http://www.w3.org/2000/svg";
const LABELS = 76, LINE = 10, GAP = 3, CHART = 92;

function svg(name, attributes = {}, inside = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (inside) inside.append(made);
  return made;
}

function text(inside, x, y, words, more = {}) {
  const made = svg("text", { x, y, ...more }, inside);
  made.textContent = words;
  return made;
}

/* matplotlib's signs of hatches -> lines in a square of 8. */
const HATCHES = {
  "": "", "//": "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6", "\\\\": "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2",
  "++": "M0,4 H8 M4,0 V8", "xx": "M0,0 L8,8 M0,8 L8,0", "--": "M0,2 H8 M0,6 H8", "..": "M2,2 h.1 M6,6 h.1",
};

function fills(categories) {
  const defs = document.querySelector("#fills defs");
  for (const [place, one] of categories.entries()) {
    const made = svg("pattern", { id: `f${place}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, defs);
    svg("rect", { width: 8, height: 8, fill: one.color }, made);
    svg("path", { d: HATCHES[one.hatch] || "", class: one.hatch === ".." ? "dots" : "hatch" }, made);
  }
}

/* Memory stacked by category against the clock, in one scale for all panels. */
function chart(stream, width, most, ticks, label) {
  const made = svg("svg", { class: "chart", width, height: CHART, viewBox: `0 0 ${width} ${CHART}`, role: "img", "aria-label": label });
  const top = 12, x = (tick) => (tick / ticks) * width, y = (size) => CHART - (size / most) * (CHART - top);
  const low = new Float64Array(stream.length), sums = stream.totals[DEVICE] || [];
  const first = firstShown(stream);
  for (const [place, sum] of sums.entries()) {
    let up = "", down = "", any = false;
    for (let event = first; event < stream.length; event++) {
      const left = x(stream.tick[event]), right = event + 1 < stream.length ? x(stream.tick[event + 1]) : width;
      const high = low[event] + sum[event];
      if (right - left > 0.02) {
        up += `L${left.toFixed(1)},${y(high).toFixed(1)}H${right.toFixed(1)}`;
        down = `L${right.toFixed(1)},${y(low[event]).toFixed(1)}H${left.toFixed(1)}${down}`;
      }
      any ||= sum[event] > 0;
      low[event] = high;
    }
    if (any) svg("path", { d: `M${up.slice(1)}${down}Z`, fill: `url(#f${place})`, class: `part c${place}` }, made);
  }
  const peak = y(stream.peak);
  svg("line", { x1: 0, x2: width, y1: peak, y2: peak, class: "peak" }, made);
  text(made, 2, peak - 3, `peak ${bytes(stream.peak)}`, { class: "peak-words" });
  made.cursor = svg("line", { y1: 0, y2: CHART, class: "cursor" }, made);
  made.place = (tick) => { const at = x(tick).toFixed(1); made.cursor.setAttribute("x1", at); made.cursor.setAttribute("x2", at); };
  return made;
}

function firstShown(stream) {
  let first = 0;
  while (first + 1 < stream.length && stream.word("kind", first + 1) === "live") first++;
  return first;
}

/* The map: a rectangle per spell, shown while it lives. */
function blockMap(stream, width, ofDevice, label) {
  const lineBytes = scalesOf(stream, ofDevice);
  const plan = arrange(stream, lineBytes);
  let y = 0;
  let tier = DEVICE;
  for (const row of plan.rows) {
    if (row.tier !== tier) { y += 15; row.heading = `${row.tier} memory; a line is ${bytes(lineBytes[row.tier])}`; }
    tier = row.tier;
    row.y = y;
    y += row.lines.length * LINE + GAP;
  }
  const made = svg("svg", { class: "map", width, height: y, viewBox: `0 0 ${width} ${y}`, tabindex: 0, role: "application", "aria-label": label });
  const scale = (of) => (width - LABELS) / lineBytes[of];
  made.rows = new Map();
  for (const row of plan.rows) {
    const height = row.lines.length * LINE - 1;
    const band = svg("rect", { x: LABELS, y: row.y, width: width - LABELS, height, class: "band" }, made);
    if (row.heading) text(made, 0, row.y - 4, row.heading, { class: "row heading" });
    const words = text(made, 0, row.y + 8.5, shorten(nameOfRow(row.key)), { class: "row" });
    svg("title", {}, words).textContent = row.key;
    made.rows.set(row.key, { band, words, key: row.key });
  }
  made.blocks = stream.spells.map((spell) => {
    const row = plan.byKey.get(spell.row), long = Math.max(1, spell.bytes * scale(spell.tier) - 0.6);
    const x = (LABELS + spell.x * scale(spell.tier)).toFixed(2), y = row.y + spell.line * LINE;
    const block = svg("rect", { x, y, width: long.toFixed(2), height: LINE - 1, class: "block" }, made);
    block.spell = spell;
    block.style.display = "none";
    return block;
  });
  return made;
}

function nameOfRow(key) { return key.replace(/^(host|nvme): /, ""); }

function shorten(words) { return words.length > 12 ? `${words.slice(0, 11)}…` : words; }

function showBlocks(map, event, fresh) {
  for (const block of map.blocks) {
    const { from, to } = block.spell, alive = from <= event && event < to;
    if (!alive) { if (block.shown) { block.style.display = "none"; block.shown = 0; } continue; }
    const category = categoryAt(block.spell, event), key = 1 + category + (from > fresh ? 100 : 0);
    if (block.shown === key) continue;
    block.shown = key;
    block.style.display = "";
    block.setAttribute("fill", `url(#f${category})`);
    block.setAttribute("class", `block c${category}${from > fresh ? " new" : ""}`);
  }
}

/* Marks rows: a unit that is whole here, and one that is being updated. */
function showUnits(map, stream, event, fresh) {
  const whole = new Map(), updated = new Set();
  for (let at = 0; at <= event; at++) {
    const kind = stream.word("kind", at);
    if (kind === "unit_gathered") whole.set(stream.word("unit", at), true);
    else if (kind === "unit_freed") whole.set(stream.word("unit", at), false);
    else if (kind === "update" && at > fresh) updated.add(stream.word("unit", at));
  }
  map.ever ??= new Set(stream.columns.kind.map((_, at) => at).filter((at) => stream.word("kind", at) === "unit_gathered").map((at) => stream.word("unit", at)));
  for (const { band, words, key } of map.rows.values()) {
    const mark = map.ever.has(key) ? (whole.get(key) ? "◆ " : "◇ ") : updated.has(key) ? "↻ " : "";
    words.firstChild.textContent = shorten(mark + nameOfRow(key));
    band.setAttribute("class", `band${whole.get(key) ? " whole" : ""}${updated.has(key) ? " updated" : ""}`);
  }
}

const WAYS = { down: ["device", "host"], up: ["host", "device"], write: ["host", "nvme"], read: ["nvme", "host"] };

/* The tiers of a rank and what moves between them: the last move stands out. */
function drawTiers(lane, width, stream, event, since) {
  const tiers = ["device", "host", "nvme"].filter((tier) => stream.totals[tier]), { sums, last } = stream.moved(event, since);
  lane.replaceChildren();
  const box = Math.min(92, width / (tiers.length > 2 ? 5 : 3.6)), step = (width - box) / Math.max(1, tiers.length - 1), at = (tier) => tiers.indexOf(tier) * step;
  for (const [way, [from, to]] of Object.entries(WAYS)) {
    if (!(way in sums) || at(from) < 0 || at(to) < 0) continue;
    const back = at(from) > at(to), y = back ? 30 : 12, [x1, x2] = back ? [at(from) - 4, at(to) + box + 4] : [at(from) + box + 4, at(to) - 4];
    const now = last && last.way === way, tip = back ? 5 : -5;
    svg("path", { d: `M${x1},${y}H${x2}M${x2 + tip},${y - 4}L${x2},${y}L${x2 + tip},${y + 4}`, class: `move${now ? " now" : ""}` }, lane);
    text(lane, (x1 + x2) / 2, y - 3, now ? bytes(last.bytes) : bytes(sums[way]), { class: `quiet${now ? " strong" : ""}` });
  }
  for (const tier of tiers) {
    svg("rect", { x: at(tier), y: 2, width: box, height: 36, rx: 7, class: "tier" }, lane);
    text(lane, at(tier) + box / 2, 17, tier, { class: "quiet" });
    text(lane, at(tier) + box / 2, 31, bytes(stream.sum(tier, event)), { class: "quiet strong" }).dataset.bytes = stream.sum(tier, event);
  }
  const words = Object.entries(sums).map(([way, size]) => `${way} ${bytes(size)}`).join(", ");
  lane.setAttribute("aria-label", `between tiers so far: ${words || "nothing"}`);
  lane.dataset.moved = JSON.stringify(sums);
}
