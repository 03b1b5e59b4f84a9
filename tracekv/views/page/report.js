// The report: sections made from its data.
"use strict";

const PARTS = {
  queue: ["waiting for its first pass", "idle"],
  lookup: ["lookup (the query)", "lookups"],
  read: ["store read", "store"],
  verify: ["verify", "worker"],
  copy: ["copy to the device", "loads"],
  stall: ["stall: its pass stood still for KV", "bad"],
  hidden: ["hidden: KV moved behind computing", "saves"],
  compute: ["computing", "scheduler"],
  between: ["between passes", "requests"],
  held: ["finished, pages held", "events"],
  untold: ["not told: calls were only counted", "counted"],
};
const { summary, timeline: picture } = data;
const byKey = new Map(data.requests.rows.map((row) => [row.key, row]));
const ROWS = ["requests", "events", "lookups", "scheduler", "worker", "passes", "hooks", "loads", "saves", "store", "idle", "counted"];

function when(ns) {
  const start = BigInt(data.start_unix_ns) + BigInt(Math.round(ns));
  return new Date(Number(start / 1000000n)).toISOString().replace("T", " ").replace("Z", " UTC");
}

function requestName(key) {
  const row = byKey.get(key);
  if (row) return row.label;
  return key === "+" ? "others" : `${key.slice(key.indexOf(":") + 1)}`;
}

// -- summary -------------------------------------------------------------------------------------------------------------

function summarySection() {
  const tile = (title, value, note) => make("div", {}, make("dt", {}, title), make("dd", {}, value, note ? make("span", { class: "small" }, note) : null));
  const isTold = summary.honoured_tokens > 0 || !summary.untold_allocations;
  const computed = Math.max(0, summary.prompt_tokens - summary.computed_tokens - summary.honoured_tokens);
  const tiles = make(
    "dl",
    { class: "tiles" },
    tile("Requests", count(data.requests.total), plural(summary.steps, "pass").replace("passs", "passes")),
    tile("Loaded", bytes(summary.loaded_bytes), plural(summary.loaded_tokens, "token")),
    tile("Saved", bytes(summary.saved_bytes), plural(summary.saved_tokens, "token")),
    tile("Load stall", duration(summary.load_stall_ns), "as connectors tell it"),
    tile("Offered, honoured", summary.offered_tokens && isTold ? share(summary.honoured_tokens, summary.offered_tokens) : "–", isTold ? `of ${plural(summary.offered_tokens, "token")} offered` : `what was taken of ${plural(summary.offered_tokens, "token")} isn't told`),
    data.findings === null ? tile("Violations", "not run", "--no-rules") : tile("Violations", count(data.violations), plural(data.suspects, "suspect")),
  );
  const source = summary.prompt_tokens
    ? [
        make("h3", {}, "Where the prompt tokens' KV came from"),
        stack("Prompt tokens", [
          ["on the device", summary.computed_tokens, "scheduler", count(summary.computed_tokens)],
          ["from the connector", summary.honoured_tokens, "loads", count(summary.honoured_tokens)],
          ["computed", computed, "passes", count(computed)],
        ]),
        summary.untold_allocations ? make("p", { class: "small muted" }, `${plural(summary.untold_allocations, "allocation")} didn't tell what was honoured.`) : null,
      ]
    : [];
  return section("summary", "Summary", tiles, ...source, groupTable(), callbackTable());
}

function groupTable() {
  if (!summary.groups.length) return null;
  const way = (name) => [
    { title: name === "load" ? "Loaded" : "Saved", number: true, value: (g) => g.ways[name].bytes, show: (g) => bytes(g.ways[name].bytes) },
    { title: "pages", number: true, wide: true, value: (g) => g.ways[name].pages },
    {
      title: "per transfer second", number: true, wide: true, value: (g) => g.ways[name].bytes,
      show: (g) => (g.ways[name].time_ns ? `${bytes((g.ways[name].bytes * 1e9) / g.ways[name].time_ns)}/s` : "–"),
    },
  ];
  return make("div", {}, make("h3", {}, "Layer groups"),
    table("Layer groups", [
      { title: "Group", value: (g) => g.id, show: (g) => String(g.id) },
      { title: "Window", number: true, value: (g) => g.window, show: (g) => (g.window === null ? "full" : count(g.window)) },
      ...way("load"), ...way("save"),
      { title: "Stall", number: true, value: (g) => g.ways.load.stall_ns, show: (g) => duration(g.ways.load.stall_ns) },
    ], summary.groups));
}

function callbackTable() {
  const most = Math.max(1, ...summary.callbacks.map((each) => each.total_ns));
  return make("div", {}, make("h3", {}, "Callbacks, all processes"),
    table("Callbacks", [
      { title: "Callback", value: (c) => c.name, show: (c) => make("code", {}, c.name) },
      { title: "Calls", number: true, value: (c) => c.calls },
      { title: "Raised", number: true, wide: true, value: (c) => c.errors, show: (c) => (c.errors ? make("strong", { class: "bad" }, count(c.errors)) : "–") },
      { title: "Total", number: true, value: (c) => c.total_ns, show: (c) => duration(c.total_ns) },
      { title: "p50", number: true, wide: true, value: (c) => c.p50_ns, show: (c) => duration(c.p50_ns) },
      { title: "p99", number: true, value: (c) => c.p99_ns, show: (c) => duration(c.p99_ns) },
      { title: "Max", number: true, wide: true, value: (c) => c.max_ns, show: (c) => duration(c.max_ns) },
      { title: "", class: "share", wide: true, show: (c) => make("i", { style: { width: `${(100 * c.total_ns) / most}%` } }) },
    ], summary.callbacks, { sortable: true }));
}

// -- timeline ------------------------------------------------------------------------------------------------------------

let view, filterBox, said;

function timelineSection() {
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const hint = make("p", { class: "small muted" }, "Click a bar for its facts. Drag to move, Ctrl and wheel or pinch to zoom; or give it the focus: arrows, + and −, 0, n and p.");
  const show = (found) => detail.replaceChildren(found ? barDetail(found) : hint);
  view = new PointedTimeline(picture, { onselect: show, describe });
  show(null);
  const span = make("span", { class: "small muted number", id: "span" });
  view.onlook = (begin, end) => (span.textContent = `${duration(end - begin)} in sight, from ${duration(Math.max(0, begin))}`);
  view.look(view.begin, view.end);
  said = make("p", { class: "small", role: "status" });
  filterBox = make("input", { id: "filter", list: "known", autocomplete: "off", spellcheck: "false", placeholder: "all requests" });
  filterBox.addEventListener("change", () => filterBy(filterBox.value.trim()));
  const button = (text, label, work, more = {}) => make("button", { type: "button", class: "button", "aria-label": label, onclick: work, ...more }, text);
  const known = make("datalist", { id: "known" }, ...[...new Set(data.requests.rows.map((row) => row.label))].map((label) => make("option", { value: label })));
  const tools = make("div", { class: "tools" },
    make("label", { for: "filter" }, "Request", filterBox), known,
    button("All", "Show all requests", () => { filterBox.value = ""; filterBy(""); }),
    make("span", { class: "gap" }), span,
    button("−", "Zoom out", () => view.zoom(1 / 0.6), { id: "zoom-out" }), button("+", "Zoom in", () => view.zoom(0.6), { id: "zoom-in" }),
    button("Fit", "Show the whole time", () => view.fit(), { id: "fit" }));
  const rows = new Set(picture.processes.flatMap((process) => process.lanes.map((lane) => lane.row)));
  const legend = make("ul", { class: "legend" }, ...ROWS.filter((row) => rows.has(row)).map((row) => make("li", {}, make("i", { style: { background: `var(--${row})` } }), LANES[row])));
  const honest = picture.drawn < picture.bars
    ? make("p", { class: "notes small" },
        `${count(picture.bars)} bars are more than a page can draw smoothly, so neighbours shorter than ${duration(picture.width_ns)} on a lane are drawn as one hatched bar that says how many (${count(picture.drawn)} are drawn). `,
        picture.narrowed ? "" : "Write a report with --request ID to see a request's time bar by bar.")
    : null;
  const narrowed = picture.narrowed ? make("p", { class: "notes small" }, "Narrowed by --request to the time of the requests below.") : null;
  return section("timeline", "Timeline", narrowed, honest, tools, said, view.element, detail, legend);
}

const LANES = {
  requests: "requests", events: "events", lookups: "lookups", scheduler: "scheduler callbacks", worker: "worker callbacks",
  passes: "forward passes", hooks: "layer hooks", loads: "loads", saves: "saves", store: "store operations", idle: "idle polls", counted: "only counted",
};

function describe({ row, bar }) {
  const name = barName(row, bar);
  const requests = bar[REQUESTS].length ? `, request ${bar[REQUESTS].map(requestName).slice(0, 4).join(", ")}` : "";
  if (bar[MANY] > 1) return `${name}: ${duration(bar[FACTS].busy_ns)} busy within ${duration(bar[LENGTH])}${requests}`;
  return `${name}: ${duration(bar[LENGTH])}${requests}`;
}

function barDetail({ row, bar }) {
  const pairs = [["when", `${duration(bar[START])} after the start (${when(bar[START])})`], ["took", duration(bar[LENGTH])]];
  if (bar[MANY] > 1) pairs.push(["bars", `${count(bar[MANY])}, drawn as one`]);
  for (const [name, value] of Object.entries(bar[FACTS])) if (name !== "request") pairs.push([words(name.replace(/_ns$/, "")), fact(name, value)]);
  const requests = bar[REQUESTS].slice(0, 16).map((key) => {
    const label = requestName(key);
    return byKey.has(key) ? make("button", { type: "button", class: "link", onclick: () => openRequest(key) }, label) : label;
  });
  if (requests.length) pairs.splice(2, 0, [requests.length > 1 ? "requests" : "request", make("span", {}, ...requests.flatMap((each, at) => (at ? [", ", each] : [each])))]);
  return make("div", {}, make("strong", {}, barName(row, bar)), make("span", { class: "muted" }, ` · ${row.lane.label} · ${row.process.name}`), facts(pairs));
}

function filterBy(text) {
  const keys = data.requests.rows.filter((row) => row.label === text).map((row) => row.key);
  const isUnknown = text !== "" && !keys.length;
  filterBox.setAttribute("aria-invalid", String(isUnknown));
  if (isUnknown) {
    const near = data.requests.rows.map((row) => row.label).sort((a, b) => far(a, text) - far(b, text)).slice(0, 3);
    said.textContent = near.length ? `There is no request ${text} among those listed here. Near: ${near.join(", ")}.` : "No requests are listed here.";
    return;
  }
  said.textContent = keys.length ? `Showing request ${text}; bars of others are faint.` : "";
  view.setFilter(keys.length ? new Set(keys) : null);
}

function far(label, text) {
  const [a, b] = [Number(label), Number(text)];
  if (Number.isFinite(a) && Number.isFinite(b)) return Math.abs(a - b);
  let same = 0;
  while (same < text.length && label[same] === text[same]) same++;
  return 1e6 - same;
}

// -- requests ------------------------------------------------------------------------------------------------------------

let story, requestTable, chosenKey;

function requestSection() {
  const { rows, total } = data.requests;
  const several = data.runs.length > 1;
  story = make("div", { class: "story gone", tabindex: "-1" });
  const chosen = data.timeline.narrowed ? "as asked for" : "those that waited longest for their KV, and those that missed most";
  const least = rows.length < total ? make("p", { class: "notes small" }, `${count(rows.length)} of ${count(total)} requests are listed: ${chosen}.`) : null;
  if (!rows.length) return section("requests", "Requests", make("p", {}, "The records name no request."));
  requestTable = table("Requests", [
    { title: "Request", value: (r) => (Number.isFinite(Number(r.label)) ? Number(r.label) : r.label), show: (r) => make("button", { type: "button", class: "link", onclick: () => openRequest(r.key) }, r.label) },
    ...(several ? [{ title: "Run", wide: true, value: (r) => r.run, show: (r) => make("code", {}, data.runs[r.run].slice(0, 8)) }] : []),
    { title: "Prompt", number: true, value: (r) => r.prompt },
    { title: "On device", number: true, wide: true, value: (r) => r.computed },
    { title: "Offered", number: true, wide: true, value: (r) => r.offered },
    { title: "Honoured", number: true, value: (r) => r.honoured },
    { title: "Loaded", number: true, wide: true, value: (r) => r.bytes, show: (r) => bytes(r.bytes) },
    { title: "Why not more", value: (r) => r.reason, show: (r) => (r.reason ? words(r.reason) : "–") },
    { title: "Stall", number: true, wide: true, value: (r) => r.stall_ns, show: (r) => duration(r.stall_ns) },
    { title: "Waited for KV", number: true, value: (r) => r.kv_ns, show: (r) => duration(r.kv_ns) },
  ], rows, { sortable: true, mark: (line, row) => line.classList.toggle("chosen", row.key === chosenKey) });
  requestTable.classList.toggle("tall", rows.length > 20);
  return section("requests", "Requests", least, make("p", { class: "small muted" }, "Choose one for its waterfall and where its time went."), requestTable, story);
}

function openRequest(key) {
  const row = byKey.get(key);
  chosenKey = key;
  requestTable.refill();
  story.classList.remove("gone");
  story.replaceChildren(...requestStory(row));
  story.scrollIntoView({ block: "nearest" });
  story.focus({ preventScroll: true });
}

function requestStory(row) {
  const { told } = row;
  const onTimeline = make("button", { type: "button", class: "button", onclick: () => {
    filterBox.value = row.label;
    filterBy(row.label);
    document.getElementById("timeline").scrollIntoView();
  } }, "Show on the timeline");
  const head = [make("h3", {}, `Request ${row.label}`), make("div", { class: "tools" }, onTimeline)];
  if (!told) return [...head, make("p", { class: "muted" }, `Its time isn't explained here: only that of the ${data.requests.rows.filter((each) => each.told).length} requests that waited longest is. \`tracekv explain ${row.label}\` tells it.`)];
  const parts = Object.entries(told.parts).map(([name, ns]) => [PARTS[name][0], ns, PARTS[name][1], duration(ns)]);
  const hidden = told.load_ns ? ` Of the ${duration(told.load_ns)} in which its KV was on the way to the device, ${share(told.load_hidden_ns, told.load_ns)} passed behind computing.` : "";
  const pairs = [
    ["prompt", `${plural(row.prompt ?? 0, "token")}, ${count(row.computed)} on the device`],
    ["stored", told.stored === null ? "not told" : `${plural(told.stored, "token")}, ${count(told.staged)} in memory when asked`],
    ["offered", `${plural(row.offered, "token")}, ${row.honoured === null ? "what was honoured isn't told" : `${count(row.honoured)} honoured`}`],
    ["loaded, saved", `${plural(told.loaded, "token")}, ${plural(told.saved, "token")}`],
    ["why not more", row.reason ? `${words(row.reason)}${told.bounding === null ? "" : `; bounded by layer group ${told.bounding}`}` : "–"],
    ...(told.store.length ? [["store", told.store.map((each) => `${plural(each.operations, each.name)}${each.failures ? ` (${each.failures} failed)` : ""} with ${plural(each.requests, "request")}, ${bytes(each.bytes)} in ${duration(each.ns)}`).join("; ")]] : []),
    ...(told.errors.length ? [["failed", told.errors.join("; ")]] : []),
    ["trace", make("code", {}, told.trace_id)],
  ];
  return [...head, make("p", {}, make("strong", {}, told.verdict)), facts(pairs),
    make("h3", {}, `Where its ${duration(told.whole_ns)} went`), make("p", { class: "small muted" }, `The parts add up to the whole.${hidden}`), stack("Parts of its time", parts),
    make("h3", {}, "Waterfall"), waterfall(row), moves(told)];
}

function waterfall(row) {
  const { told } = row;
  const begin = Math.min(told.start, ...told.bars.map((bar) => bar[3]));
  const end = Math.max(told.start + told.whole_ns, ...told.bars.map((bar) => bar[3] + bar[4]), begin + 1);
  const lanes = new Map();
  for (const bar of told.bars) {
    const name = `${bar[0] === null ? "" : `rank ${bar[0]} · `}${bar[1]}`;
    if (!lanes.has(name)) lanes.set(name, []);
    lanes.get(name).push(bar);
  }
  const at = (ns) => `${(100 * (ns - begin)) / (end - begin)}%`;
  const cells = [...lanes].flatMap(([name, bars]) => [
    make("span", { class: "name", title: name }, name, bars.length > 1 ? make("span", { class: "muted" }, ` × ${bars.length}`) : null),
    make("div", { class: "lane" }, ...bars.map((bar) => make("i", {
      title: `${bar[1]}: ${duration(bar[4])}, ${duration(bar[3] - begin)} after its start`, class: bar[5].error ? "failed" : null,
      style: { left: at(bar[3]), width: at(begin + bar[4]), background: `var(--${ROWS[bar[2]]})` },
    }))),
  ]);
  const list = make("details", {}, make("summary", {}, `All ${plural(told.bars.length, "event")} as a table`));
  list.addEventListener("toggle", () => {
    if (list.children.length > 1) return;
    list.append(table("Events of the request", [
      { title: "After", number: true, show: (b) => duration(b[3] - begin) },
      { title: "Took", number: true, show: (b) => duration(b[4]) },
      { title: "Rank", number: true, show: (b) => (b[0] === null ? "–" : String(b[0])) },
      { title: "What", show: (b) => b[1] },
      { title: "Facts", wide: true, show: (b) => Object.entries(b[5]).map(([name, value]) => `${words(name.replace(/_ns$/, ""))} ${fact(name, value)}`).join(", ") },
    ], told.bars));
  });
  return make("div", {}, make("div", { class: "fall" }, ...cells), list);
}

function moves(told) {
  if (!told.moved.length) return make("p", { class: "muted" }, "Nothing of it is known to have moved.");
  return make("div", {}, make("h3", {}, "What moved"), table("What moved", [
    { title: "Way", show: (m) => m.way }, { title: "Rank", number: true, show: (m) => (m.rank === null ? "–" : String(m.rank)) },
    { title: "Group", number: true, show: (m) => String(m.group) }, { title: "Tier", show: (m) => m.tier }, { title: "Known as", wide: true, show: (m) => m.source },
    { title: "Bytes", number: true, show: (m) => bytes(m.bytes) }, { title: "Pages", number: true, wide: true, show: (m) => count(m.pages) },
    { title: "Time", number: true, show: (m) => duration(m.ns) }, { title: "Stall", number: true, wide: true, show: (m) => duration(m.stall_ns) },
    { title: "Failed", number: true, wide: true, show: (m) => (m.failures ? make("strong", { class: "bad" }, count(m.failures)) : "–") },
  ], told.moved));
}

// -- stalls and misses -----------------------------------------------------------------------------------------------------

function tally(title, rows, nothing, show = (row) => words(row.name)) {
  const most = Math.max(1, ...rows.map((row) => row.count));
  return make("div", {}, make("h3", {}, title), rows.length
    ? table(title, [
        { title: "What", show: (row) => make("span", {}, show(row), row.meaning ? make("span", { class: "small muted wide" }, ` – ${row.meaning}`) : null) },
        { title: "Times", number: true, show: (row) => count(row.count) },
        { title: "", class: "share", show: (row) => make("i", { style: { width: `${(100 * row.count) / most}%` } }) },
      ], rows)
    : make("p", { class: "muted" }, nothing));
}

function stallSection() {
  const sums = {};
  const explained = data.requests.rows.filter((row) => row.told);
  for (const row of explained) for (const [name, ns] of Object.entries(row.told.parts)) sums[name] = (sums[name] ?? 0) + ns;
  const stood = ["worker.start_load_kv", "worker.wait_for_layer_load", "worker.save_kv_layer", "worker.wait_for_save", "worker.bind_connector_meta", "worker.get_finished"];
  const inside = summary.callbacks.filter((each) => stood.includes(each.name)).map((each) => ({ name: each.name, count: each.total_ns }));
  const most = Math.max(1, ...inside.map((row) => row.count));
  const groups = summary.groups.filter((group) => group.ways.load.stall_ns);
  return section("stalls", "Stalls and misses",
    make("h3", {}, `Where the time of ${explained.length === data.requests.total ? "all" : `the ${count(explained.length)} explained`} requests went`),
    explained.length ? stack("Parts", Object.entries(sums).map(([name, ns]) => [PARTS[name][0], ns, PARTS[name][1], duration(ns)])) : make("p", { class: "muted" }, "The records name no request."),
    make("div", { class: "columns" },
      make("div", {}, make("h3", {}, "Time the engine thread stood inside the connector, measured"),
        inside.length ? table("Time inside the connector", [
          { title: "Callback", show: (row) => make("code", {}, row.name) }, { title: "Total", number: true, show: (row) => duration(row.count) },
          { title: "", class: "share", show: (row) => make("i", { style: { width: `${(100 * row.count) / most}%` } }) }], inside) : make("p", { class: "muted" }, "No worker callback is recorded."),
        make("h3", {}, "Stalls by layer group, as connectors tell them"),
        groups.length ? table("Stalls by layer group", [{ title: "Group", show: (g) => String(g.id) }, { title: "Stall", number: true, show: (g) => duration(g.ways.load.stall_ns) }], groups) : make("p", { class: "muted" }, "None was told.")),
      make("div", {}, tally("Lookups that gave less than the prompt allows", summary.misses, summary.lookups ? "None: every lookup was a full hit." : "The connector tells of no lookups."),
        tally("Layer group that bounded a hit", summary.bounding, "None did.", (row) => `layer group ${row.name}`),
        summary.drops.length ? tally("Blocks given up", summary.drops, "") : null,
        summary.store.length ? tally("Store operations", summary.store, "", (row) => make("code", {}, row.name)) : null,
        summary.store_use.length ? storeUse(summary) : null)));
}

function storeUse({ store_use: use, hits }) {
  const read = use.find((each) => each.name === "read");
  const cost = read && hits ? make("p", { class: "small muted" }, `${bytes(read.bytes / hits)} with ${(read.requests / hits).toFixed(1)} requests were read for each query that was offered something.`) : null;
  return make("div", {}, make("h3", {}, "What the store was asked"), table("What the store was asked", [
    { title: "Operation", show: (row) => make("code", {}, row.name) },
    { title: "Requests", number: true, show: (row) => count(row.requests) },
    { title: "Bytes", number: true, show: (row) => bytes(row.bytes) }], use), cost);
}

// -- rules and settings ----------------------------------------------------------------------------------------------------

function ruleSection() {
  const { findings } = data;
  if (findings === null) return section("rules", "Contract rules", make("p", { class: "muted" }, "They weren't run (--no-rules). `tracekv check` runs them alone."));
  if (!findings.length) return section("rules", "Contract rules", make("p", { class: "good" }, "No rule of the connector contract is broken, as far as these records tell."));
  const more = Object.entries(data.more_findings).map(([rule, times]) => `${count(times)} of ${rule}`).join(", ");
  return section("rules", "Contract rules", ...findings.map(finding), more ? make("p", { class: "small muted" }, `Found as well, and not listed here: ${more}.`) : null);
}

function finding(each) {
  const where = [each.callback, each.request !== null && `request ${each.request}`, each.step && `pass ${each.step}`, each.rank !== null && `rank ${each.rank}`].filter(Boolean).join(", ");
  const numbers = Object.entries(each.numbers).map(([name, value]) => `${words(name)} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const proof = each.evidence.length ? make("details", { class: "small" }, make("summary", {}, `Proof: ${plural(each.evidence.length, "record")}`),
    ...each.evidence.map((record) => make("p", {}, make("code", {}, Object.entries(record).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", "))))) : null;
  return make("div", { class: "finding" },
    make("div", {}, make("span", { class: `badge ${each.severity === "violation" ? "bad" : "warn"}` }, each.severity), make("strong", {}, `${each.rule} `), each.what),
    make("p", { class: "small muted" }, `by the ${each.by}: ${where}${each.caused_by ? `; follows from ${each.caused_by}` : ""}`),
    numbers ? make("p", { class: "small" }, numbers) : null, make("p", { class: "small" }, "→ ", each.fix), proof);
}

function settingSection() {
  const digests = (run) => new Set(data.processes.filter((each) => each.run === run && each.settings).map((each) => each.settings));
  const isMixed = data.runs.some((run) => digests(run).size > 1);
  const differ = isMixed ? make("p", { class: "notes small" }, "Ranks of one run resolved different settings: compare their digests.") : null;
  return section("settings", "Settings", differ, ...data.processes.map((each, at) => make("details", { open: at === 0 },
    make("summary", {}, make("strong", {}, `${each.rank === null ? "" : `rank ${each.rank} of ${each.world} · `}${each.name}`), make("span", { class: "muted" }, ` · run ${each.run.slice(0, 8)}`)),
    facts([
      ["records", `${count(each.records)}${each.lost ? `, ${count(each.lost)} lost` : ""}`],
      ["tracekv", each.version ?? "–"],
      ["settings digest", each.settings ?? "–"],
      ...each.classes.map((known) => [known.side, make("span", {}, make("code", {}, known.name), known.not_implemented.length ? ` without ${known.not_implemented.join(", ")}` : "")]),
      ["tokens per block", count(each.tokens_per_block)],
      ["dtype", each.dtype ?? "–"],
      ["layer groups", each.groups.length ? each.groups.map((g) => `${g.id}: ${plural(g.layers, "layer")}, ${g.window === null ? "full attention" : `window ${count(g.window)}`}, ${count(g.slots)} pages of ${bytes(g.bytes_per_page)}`).join("; ") : "–"],
      ...each.events.map((event) => ["note", event]),
    ]))));
}

// -- the page ----------------------------------------------------------------------------------------------------------------

const notes = data.notes.length ? [make("div", { class: "notes small" }, ...data.notes.map((note) => make("p", {}, note)))] : [];
const about = make("p", { class: "muted" }, `${when(picture.begin)} · ${duration(picture.end - picture.begin)} · ${plural(data.processes.length, "process").replace("processs", "processes")} · ${plural(data.runs.length, "run")} · ${plural(summary.records, "record")} · tracekv ${data.version}`);
frame("tracekv report", [about, ...notes], [summarySection(), timelineSection(), requestSection(), stallSection(), ruleSection(), settingSection()]);
view.resize();
