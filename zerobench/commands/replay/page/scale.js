/* A figure of every world against N: what was measured as full marks, simulated ones as hollow marks. */

const FIGURES = { peak_bytes: "peak", states_bytes: "model states", wire_bytes: "sent per step" };

function scaleFigure(root, data, chosen, column) {
  const width = Math.max(280, Math.min(560, root.clientWidth)), height = 230, left = 68, bottom = 34, top = 10;
  const label = `${FIGURES[column]} of a rank against the number of ranks; the table has the values`;
  const made = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "scale", role: "img", "aria-label": label });
  const steps = [...new Set(data.worlds.map((one) => one.n))].sort((a, b) => a - b);
  const most = 1.08 * Math.max(...data.worlds.flatMap((world) => world.panels.map((panel) => panel[column] || 0)));
  const x = (n) => left + 14 + (steps.length > 1 ? (Math.log2(n / steps[0]) / Math.log2(steps.at(-1) / steps[0])) * (width - left - 34) : (width - left) / 2);
  const y = (size) => height - bottom - (size / most) * (height - bottom - top);
  for (let line = 0; line <= 4; line++) {
    const size = (most / 1.08) * line / 4;
    svg("line", { x1: left, x2: width, y1: y(size), y2: y(size), class: "grid" }, made);
    text(made, left - 6, y(size) + 4, bytes(size), { class: "tick end" });
  }
  for (const n of steps) text(made, x(n), height - bottom + 16, n.toLocaleString("en-US"), { class: "tick middle" });
  text(made, (left + width) / 2, height - 4, "ranks N", { class: "tick middle" });
  svg("line", { x1: x(chosen.n), x2: x(chosen.n), y1: top, y2: height - bottom, class: "cursor" }, made);
  const keys = [...new Set(data.worlds.flatMap((world) => world.panels.map((panel) => panel.key)))];
  for (const [place, key] of keys.entries()) scaleLine(made, data, key, place, column, x, y);
  root.replaceChildren(made, scaleLegend(data, keys));
}

const DASHES = ["", "7 3", "7 3 2 3", "2 3", "12 4", "1 5", "9 2 2 2 2 2", "4 4"];

function scaleLine(made, data, key, place, column, x, y) {
  const points = data.worlds.flatMap((world) => world.panels.filter((one) => one.key === key && one[column] != null)
    .map((panel) => ({ n: world.n, how: world.how, size: panel[column], color: panel.color, label: panel.label })));
  if (!points.length) return;
  const line = points.map((one, number) => `${number ? "L" : "M"}${x(one.n).toFixed(1)},${y(one.size).toFixed(1)}`).join("");
  const group = svg("g", { style: `--look: ${points[0].color}` }, made);
  svg("path", { d: line, class: "line look", "stroke-dasharray": DASHES[place % DASHES.length] }, group);
  for (const one of points) {
    const mark = svg("circle", { cx: x(one.n), cy: y(one.size), r: 4.5, class: `mark look ${one.how}` }, group);
    svg("title", {}, mark).textContent = `${one.label}, N = ${one.n}, ${one.how}: ${exact(one.size)}`;
  }
}

function scaleLegend(data, keys) {
  const list = element("p", { class: "looks" });
  keys.forEach((key, place) => {
    const panel = data.worlds.flatMap((world) => world.panels).find((one) => one.key === key);
    const sample = svg("svg", { width: 34, height: 10, "aria-hidden": "true", style: `--look: ${panel.color}` });
    svg("path", { d: "M1,5H33", class: "line look", "stroke-dasharray": DASHES[place % DASHES.length] }, sample);
    list.append(element("span", {}, sample, ` ${panel.label}`));
  });
  list.append(element("span", { class: "key" }, "● measured  ○ simulated"));
  return list;
}

function scaleTable(root, world) {
  const head = ["strategy", "peak", "states", "formula of the states", "its bytes", "sent per step", "volume"];
  const rows = world.panels.map((panel) => {
    if (panel.problem) return element("tr", {}, element("th", { scope: "row" }, panel.label), element("td", { colspan: head.length - 1, class: "left" }, panel.problem));
    const form = panel.formulas.states;
    const cells = [show(panel.peak_bytes), show(panel.states_bytes), [form ? form.equation : "–", ""], show(form && form.value), show(panel.wire_bytes),
      [panel.volume_psi == null ? "–" : `${panel.volume_psi.toFixed(3)} ψ`, ""]];
    const made = cells.map(([words, size]) => element("td", size === "" ? {} : { "data-bytes": size, title: exact(size) }, words));
    return element("tr", { "data-key": panel.key }, element("th", { scope: "row" }, panel.label), ...made);
  });
  const body = element("tbody", {}, ...rows);
  const top = element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name))));
  root.replaceChildren(element("table", {}, element("caption", {}, `One rank of N = ${world.n.toLocaleString("en-US")}, ${world.how}`), top, body));
}

function show(size) { return size == null ? ["–", ""] : [bytes(size), size]; }
