// The diff: what changed most, then each kind of number, A beside B.
"use strict";

const [a, b] = data.sides;

function shown(value, unit) {
  if (value === null) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  return unit === "ns" ? duration(value) : unit === "bytes" ? bytes(value) : value >= 1000 ? count(Math.round(value)) : Number(value.toPrecision(3)).toLocaleString("en-US");
}

function changed(change) {
  if (change.a === change.b) return "=";
  if (change.kind !== "callbacks" && (change.a === null || change.b === null)) return "not told";
  if (change.unit === "share") return `${change.b > change.a ? "+" : "−"}${Math.abs(100 * (change.b - change.a)).toFixed(1)} pt`;
  if (!change.a) return "new";
  if (!change.b) return "gone";
  return change.factor >= 2 ? `×${digits(change.factor)}` : `${change.factor > 1 ? "+" : "−"}${Math.abs(100 * (change.factor - 1)).toFixed(1)} %`;
}

function both(change) {
  const most = Math.max(change.a ?? 0, change.b ?? 0) || 1;
  const bar = (value, tint) => make("i", { style: { width: `${(100 * (value ?? 0)) / most}%`, background: `var(--${tint})`, marginTop: "2px", height: ".5em" } });
  return make("div", { class: "bars", role: "img", "aria-label": `A ${shown(change.a, change.unit)}, B ${shown(change.b, change.unit)}` }, bar(change.a, "passes"), bar(change.b, "scheduler"));
}

function rows(title, changes, named) {
  return table(title, [
    { title: "What", value: (c) => c.name, show: (c) => make("span", {}, named ? make("span", { class: "muted" }, `${data.titles[c.kind].split(/,| per /)[0]} · `) : null, c.kind.startsWith("call") ? make("code", {}, c.name) : words(c.name)) },
    { title: "A", number: true, value: (c) => c.a, show: (c) => shown(c.a, c.unit) },
    { title: "B", number: true, value: (c) => c.b, show: (c) => shown(c.b, c.unit) },
    { title: "Change", number: true, value: (c) => c.proportion, show: (c) => make("strong", { class: c.score > 0.2 ? "warn" : null }, changed(c)) },
    { title: "per", wide: true, value: (c) => c.per, show: (c) => c.per },
    { title: "", class: "share", wide: true, show: both },
  ], changes, { sortable: true });
}

function side(letter, run, tint) {
  return make("div", {}, make("dt", {}, make("i", { class: "swatch", style: { background: `var(--${tint})` } }), `${letter}: ${run.name}`),
    make("dd", {}, `${plural(run.summary.queries, "request")}`, make("span", { class: "small" }, `${count(run.summary.steps)} passes, ${plural(run.summary.records, "record")}`)));
}

const moved = data.changes.filter((change) => change.score > 0);
const most = section("most", "What changed most", make("dl", { class: "tiles" }, side("A", a, "passes"), side("B", b, "scheduler")),
  moved.length ? rows("What changed most", moved.slice(0, 12), true) : make("p", { class: "good" }, "Nothing changed."),
  make("p", { class: "small muted" }, "Numbers are per request, pass, lookup or call, so that runs of different lengths compare; a change weighs by its proportion and by how much of its kind it is."));
const kinds = Object.entries(data.titles)
  .map(([kind, title]) => [kind, title, data.changes.filter((change) => change.kind === kind)])
  .filter(([, , changes]) => changes.length)
  .map(([kind, title, changes]) => section(kind, title, rows(title, changes, false)));
const told = [a, b].flatMap((run) => run.notes).map((note) => make("p", {}, note));
frame("tracekv diff", [make("p", { class: "muted" }, `tracekv ${data.version}`), ...(told.length ? [make("div", { class: "notes small" }, ...told)] : [])], [most, ...kinds]);
