"use strict";
// The table: `data` holds every column, one that repeats itself as its different values; `order` is the runs in the order shown, `chosen` the columns.
const data = JSON.parse(document.getElementById("data")?.textContent ?? "[]");
for (const column of data.filter((one) => one.of))
  for (const key of ["values", "texts"]) if (column[key]) { const few = column[key]; column[key] = column.of.map((place) => few[place]); }
const table = document.getElementById("runs-table"), count = document.getElementById("count");
const links = [...(table?.tBodies[0].rows ?? [])].map((row) => row.querySelector("a")?.getAttribute("href"));
const text = (column, run) => String((column.texts ?? column.values)[run] ?? "–");
let sorted = null, rising = true;

const element = (name, words = "", more = {}) => Object.assign(document.createElement(name), { textContent: words }, more);

function order() {
  const runs = links.map((_, run) => run);
  if (!sorted) return runs;
  const missing = (value) => value === null || value === "–";
  return runs.sort((a, b) => {
    const [x, y] = [sorted.values[a], sorted.values[b]];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return rising ? by : -by;
  });
}

// A condition is COLUMN, one of = != < > <= >=, and a value; every other word is looked for in the texts shown.
function condition(word) {
  const [, name, sign, wanted] = word.match(/^([^=<>!]+)(<=|>=|!=|=|<|>)(.+)$/) ?? [];
  const column = data.find((one) => one.name === name);
  if (!column) return (run) => data.some((one) => one.shown && text(one, run).toLowerCase().includes(word.toLowerCase()));
  return (run) => {
    const value = column.values[run], number = Number(wanted);
    if (sign === "=" || sign === "!=") {
      const equal = value !== null && (String(value) === wanted || text(column, run) === wanted || value === number);
      return equal === (sign === "=");
    }
    if (value === null || Number.isNaN(number)) return false;
    return { "<": value < number, ">": value > number, "<=": value <= number, ">=": value >= number }[sign];
  };
}

function show() {
  const columns = data.filter((column) => column.shown);
  const conditions = document.getElementById("filter").value.split(/\s+/).filter(Boolean).map(condition);
  const runs = order().filter((run) => conditions.every((meets) => meets(run)));
  const body = document.createElement("tbody");
  for (const run of runs) {
    const row = body.insertRow();
    for (const column of columns) {
      const cell = row.insertCell(), words = text(column, run);
      if (column.number) cell.className = "n";
      if (column.name === "cell" && links[run]) cell.append(element("a", words, { href: links[run] }));
      else cell.textContent = words;
    }
  }
  if (!runs.length) body.insertRow().append(element("td", "No run meets this filter.", { colSpan: columns.length }));
  table.tBodies[0].replaceWith(body);
  count.textContent = `${runs.length} of ${links.length} runs`;
}

function heads() {
  const row = document.createElement("tr");
  for (const column of data.filter((one) => one.shown)) {
    const head = element("th", "", { scope: "col", className: column.number ? "n" : "" });
    const button = element("button", column.name, { type: "button", title: column.meaning });
    head.setAttribute("aria-sort", column === sorted ? (rising ? "ascending" : "descending") : "none");
    head.append(button);
    row.append(head);
  }
  table.tHead.rows[0].replaceWith(row);
}

if (table) {
  table.tHead.addEventListener("click", (event) => {
    const name = event.target.closest("button")?.textContent;
    if (!name) return;
    rising = sorted?.name === name ? !rising : true;
    sorted = data.find((column) => column.name === name);
    heads();
    show();
    [...table.tHead.querySelectorAll("button")].find((button) => button.textContent === name).focus();
  });
  document.getElementById("filter").addEventListener("input", show);
  const choice = document.getElementById("columns");
  choice.closest("details").addEventListener("toggle", () => {
    if (choice.querySelector("input")) return;
    for (const column of data) {
      const box = element("input", "", { type: "checkbox", checked: column.shown });
      const label = element("label", "", { title: column.meaning });
      label.append(box, ` ${column.name}`);
      choice.append(label);
      box.addEventListener("change", () => { column.shown = box.checked; heads(); show(); });
    }
  });
}

// Parts that are text until they are opened: by hand, by a link to them, or, of few, for print.
function reveal(part) {
  const held = part.querySelector(":scope > script[type='text/html']");
  if (held) held.outerHTML = held.textContent;
}
document.addEventListener("toggle", (event) => event.target.open && reveal(event.target), true);
function follow() {
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (part?.tagName === "DETAILS") { reveal(part); part.open = true; part.scrollIntoView(); }
}
addEventListener("hashchange", follow);
document.addEventListener("click", (event) => event.target.closest("a")?.hash === location.hash && follow());
const FEW = 8;
addEventListener("beforeprint", () => {
  const accounts = document.querySelectorAll("#accounts details");
  if (accounts.length <= FEW) for (const part of accounts) part.open = true;
  for (const part of document.querySelectorAll("#verdict details, #cells details")) part.open = true;
});
follow();

// Values of figures, on hover, focus and touch; Escape hides them.
const tip = document.getElementById("tip");
function tell(event) {
  const pointed = event.target.closest?.("[data-tip]"); // a page that scrolls below a resting pointer points, too
  const place = pointed ?? document.activeElement?.closest("[data-tip]");
  tip.hidden = !place;
  if (!place) return;
  tip.textContent = place.dataset.tip;
  const by = pointed && event.type === "mouseover", label = (place.querySelector(".label") ?? place).getBoundingClientRect();
  const x = by ? event.clientX + 14 : label.left, under = by ? event.clientY + 18 : label.bottom + 34;
  tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
  const above = under + tip.offsetHeight > innerHeight - 8 ? under - tip.offsetHeight - 60 : under;
  tip.style.top = `${Math.max(above, 8) + scrollY}px`;
}
document.addEventListener("mouseover", tell);
document.addEventListener("focusin", tell);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const words = button.parentElement.querySelector("code").textContent;
  const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
  if (navigator.clipboard) navigator.clipboard.writeText(words).then(done, () => select(button));
  else select(button);
});
function select(button) { getSelection().selectAllChildren(button.parentElement.querySelector("code")); }
document.body.dataset.ready = "yes";
