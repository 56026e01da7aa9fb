/* Blocks in rows: a row per unit or part of the model, wrapped into lines of equal bytes. A storage keeps its place for as
   long as it lives: the first gap that is wide enough when it is born. */

const FEW = 0.06; /* of a line: rows that never hold more are one row together */
const OTHERS = "all else";

/* Bytes of the parameters of each part of the model: a gradient buffer that is larger belongs to no one part. */
function partsOf(stream) {
  const sums = new Map(), parameters = stream.places.get("parameters");
  for (const spell of stream.spells) {
    const name = part(stream.word("name", spell.made));
    if (spell.categories[0][1] === parameters && name) sums.set(name, (sums.get(name) || 0) + spell.bytes);
  }
  return sums;
}

function rowOf(stream, spell, sums) {
  if (spell.tier !== DEVICE) return `${spell.tier}: ${stream.word("unit", spell.made) || part(stream.word("name", spell.made)) || OTHERS}`;
  const unit = stream.word("unit", spell.made);
  if (unit) return unit;
  const category = stream.data.categories[spell.categories[0][1]].name;
  if (category === "optimizer" || category === "master") return category;
  if (category === "inputs") return "batch";
  const named = part(stream.word("name", spell.made));
  if (category === "gradients" && sums.has(named) && spell.bytes > sums.get(named)) return category;
  return named || part(stream.word("module", spell.made), true) || OTHERS;
}

/* The part of a model that a path lies in: "blocks.3" of "blocks.3.mlp_in.weight"; empty where it is no path. */
function part(path, alone = false) {
  const names = path.replace(/^(module|_orig_mod)\./, "").split(".");
  if (/\s/.test(path) || (names.length < 2 && !alone)) return "";
  return /^\d+$/.test(names[1] || "") ? `${names[0]}.${names[1]}` : names[0];
}

function arrange(stream, lineBytes) {
  const most = new Map(), now = new Map();
  const changes = stream.spells.flatMap((spell) => [{ at: spell.from, born: true, spell }, { at: spell.to, born: false, spell }])
    .filter((one) => one.at < Infinity).sort((a, b) => a.at - b.at || a.born - b.born);
  const sums = partsOf(stream);
  for (const spell of stream.spells) spell.row = rowOf(stream, spell, sums);
  for (const { born, spell } of changes) {
    now.set(spell.row, (now.get(spell.row) || 0) + (born ? spell.bytes : -spell.bytes));
    most.set(spell.row, Math.max(most.get(spell.row) || 0, now.get(spell.row)));
  }
  const rows = new Map();
  const units = new Set(stream.spells.map((spell) => stream.word("unit", spell.made)).filter(Boolean));
  for (const { born, spell } of changes) {
    if (born) {
      if (most.get(spell.row) < FEW * lineBytes[DEVICE] && spell.tier === DEVICE && !units.has(spell.row)) spell.row = OTHERS;
      if (!rows.has(spell.row)) rows.set(spell.row, { key: spell.row, tier: spell.tier, lines: [] });
      settle(spell, rows.get(spell.row).lines, lineBytes[spell.tier]);
    } else {
      const line = rows.get(spell.row).lines[spell.line];
      line.splice(line.indexOf(spell), 1);
    }
  }
  const found = [...rows.values()].sort((a, b) => rank(a) - rank(b));
  let line = 0;
  for (const row of found) { row.first = line; line += row.lines.length; }
  return { rows: found, lines: line, byKey: rows };
}

function rank(row) { return row.key === OTHERS ? 1 : row.tier === DEVICE ? 0 : row.tier === "host" ? 2 : 3; }

function settle(spell, lines, lineBytes) {
  for (let number = 0; ; number++) {
    const line = lines[number] ??= [];
    let x = 0, place = 0;
    while (place < line.length && line[place].x - x < spell.bytes) { x = line[place].x + line[place].bytes; place++; }
    if (place < line.length || lineBytes - x >= spell.bytes || !line.length) {
      spell.line = number;
      spell.x = x;
      line.splice(place, 0, spell);
      return;
    }
  }
}

/* Bytes of a line of device memory, for all streams of a world: no block is longer, and the fullest needs some fifteen. */
function lineBytesOf(streams) {
  const spells = streams.flatMap((one) => one.spells.filter((spell) => spell.tier === DEVICE));
  return Math.max(...spells.map((spell) => spell.bytes), Math.max(...streams.map((one) => one.peak)) / 13);
}

/* The same by tier: host memory and files have a scale of their own in each stream. */
function scalesOf(stream, ofDevice) {
  const found = { [DEVICE]: ofDevice };
  for (const { tier, bytes: size } of stream.spells) if (tier !== DEVICE) found[tier] = Math.max(found[tier] || 1, size, ofDevice);
  return found;
}
