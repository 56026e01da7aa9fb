/* Numbers and events in words. */

function bytes(size) {
  for (const [unit, digits, of] of [["TiB", 2, 2 ** 40], ["GiB", 2, 2 ** 30], ["MiB", 1, 2 ** 20], ["KiB", 1, 2 ** 10]])
    if (Math.abs(size) >= of) return `${rounded(size / of, digits)} ${unit}`;
  return `${rounded(size, 0)} B`;
}

/* As Python rounds, so that the page says what the terminal says: a half goes to the even digit. */
function rounded(value, digits) {
  const scaled = value * 10 ** digits, low = Math.floor(scaled);
  return scaled - low === 0.5 && low % 2 === 0 ? (low / 10 ** digits).toFixed(digits) : value.toFixed(digits);
}

function exact(size) { return `${Math.round(size).toLocaleString("en-US")} B`; }

function spoken(word) { return word.replaceAll("_", "-"); }

function nameOf(stream, event) {
  return stream.word("name", event) || stream.word("unit", event) || part(stream.word("module", event), true) || maker(stream.word("source", event));
}

/* The function of "backward of file.py:12 in Block.forward". */
function maker(source) {
  const found = source.match(/^(backward of )?.* in (.+)$/);
  return found ? `${found[1] || ""}${found[2]}` : source || "without a label";
}

const SAYS = {
  live: () => "the step begins",
  birth: (s, e) => `+ ${bytes(s.number("bytes", e))} ${s.word("category", e)}: ${nameOf(s, e)}`,
  free: (s, e) => `− ${bytes(s.number("bytes", e))} ${s.word("category", e)}: ${nameOf(s, e)}`,
  label: (s, e) => `${s.word("previous", e)} become ${s.word("category", e)}: ${nameOf(s, e)}`,
  launch: (s, e) => `${spoken(s.word("collective", e))} of ${s.word("unit", e) || "a buffer"} is launched`,
  wait: (s, e) => landed(s, e),
  move: (s, e) => `${bytes(s.number("bytes", e))} move to ${s.word("tier", e)}: ${nameOf(s, e)}`,
  module: (s, e) => `${s.word("operator", e)} of ${s.word("name", e) || "the model"}`,
  module_end: (s, e) => `${s.word("name", e) || "the model"} is done`,
  unit_gathered: (s, e) => `${s.word("unit", e)} is gathered: ${bytes(s.number("bytes", e))} of parameters`,
  unit_freed: (s, e) => `${s.word("unit", e)} is given back`,
  update: (s, e) => `${s.word("unit", e) || "the parameters"}: ${bytes(s.number("bytes", e))} are updated`,
  phase: (s, e) => `${s.word("name", e)} begins`,
};

function landed(stream, event) {
  const one = stream.operations.find((other) => other.wait === event);
  return one ? `${spoken(one.collective)} of ${one.unit || "a buffer"} has landed` : "a collective has landed";
}

function says(stream, event) { return (SAYS[stream.word("kind", event)] || (() => ""))(stream, event); }

const TELLING = ["launch", "wait", "unit_gathered", "unit_freed", "update", "move", "phase"];

/* The last event of those that tell most since another, or the last at all. */
function telling(stream, event, since) {
  for (let at = event; at > since; at--) if (TELLING.includes(stream.word("kind", at))) return at;
  return event;
}

/* Where in the model a stream is: the last module or phase that has begun. */
function moduleAt(stream, event) {
  for (let at = event; at >= 0; at--) {
    const kind = stream.word("kind", at);
    if (kind === "module") return `${stream.word("operator", at)} of ${stream.word("name", at) || "the model"}`;
    if (kind === "phase") return stream.word("name", at);
  }
  return "";
}

const CLOSED = { temporary: 1, inputs: 1, activations: 1 };

/* The closed form that a category belongs to, in words; what lies beside it. */
function equationOf(panel, category) {
  const form = panel.formulas[category];
  if (!form) return CLOSED[category] ? "no model state: ZeRO's formulas do not count it" : "no closed form for this strategy";
  const beside = form.beside.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
  const numbers = Object.entries(form.numbers).map(([name, value]) => `${name} = ${value.toLocaleString("en-US")}`).join(", ");
  const value = `${form.equation} = ${exact(form.value)}${numbers ? ` (${numbers})` : ""}`;
  return `${value}${beside ? `; in flight beside it: ${beside}` : ""}. ${panel.states_source}`;
}

function when(stream, event) { return `${(stream.us[event] / 1000).toFixed(2)} ms`; }

/* Rows of the card on a block. */
function factsOf(panel, stream, spell, event) {
  const category = stream.data.categories[categoryAt(spell, event)].name;
  const until = spell.to < Infinity ? `event ${spell.to.toLocaleString("en-US")}` : "the end of the step";
  return [
    ["tensor", stream.word("name", spell.made) || "without a label"],
    ["unit", stream.word("unit", spell.made) || "none"],
    ["category", `${category}${spell.tier === DEVICE ? "" : `, in ${spell.tier} memory`}`],
    ["bytes", `${exact(spell.bytes)} (${bytes(spell.bytes)})`],
    ["equation", equationOf(panel, category)],
    ["made by", stream.word("source", spell.made) || "no line of Python"],
    ["module", stream.word("module", spell.made) || "none"],
    ["lives", `event ${spell.from.toLocaleString("en-US")} (${when(stream, spell.from)}) until ${until}`],
  ];
}

function factsOfOperation(panel, stream, one, event) {
  const volume = panel.formulas.volume, [size, wire, between] = ["bytes", "wire_bytes", "between_bytes"].map((column) => stream.launched(one, column, event));
  return [
    ["collective", spoken(one.collective)], ["unit", one.unit || "none"], ["ranks", `${one.ranks}`],
    ["launched at", `event ${one.from.toLocaleString("en-US")}, by ${stream.word("source", one.from) || "no line of Python"}`],
    ["bytes", `${exact(size)} of tensors, ${exact(wire)} sent by a rank`],
    ...(between ? [["between nodes", exact(between)]] : []),
    ["equation", volume ? `volume of a step: ${volume.equation} elements = ${volume.value.toLocaleString("en-US")}. ${panel.volume_source}` : "no closed form"],
  ];
}
