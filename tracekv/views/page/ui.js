// What report and diff share: making elements, numbers for people, tables that sort. Text only ever becomes a text node.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function count(value) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US", { maximumFractionDigits: 1 });
}

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
  return `${count(value)} B`;
}

function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns), sign = ns < 0 ? "−" : "";
  if (size >= 60e9) return `${sign}${Math.floor(size / 60e9)} min ${((size % 60e9) / 1e9).toFixed(0)} s`;
  for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (size >= scale) return `${sign}${digits(size / scale)} ${unit}`;
  return `${sign}${size} ns`;
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)} %` : "–";
}

function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A value of a bar's facts, in the unit that its name tells.
function fact(name, value) {
  if (name.endsWith("_ns")) return duration(value);
  if (name === "nbytes" || name.startsWith("bytes")) return bytes(value);
  if (Array.isArray(value)) return value.join(", ");
  if (value !== null && typeof value === "object")
    return Object.entries(value).map(([key, times]) => `${times} × ${key}`).join(", ");
  return typeof value === "number" ? count(value) : String(value);
}

function facts(pairs) {
  return make("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// columns: {title, value(row) to sort by, show(row) -> text or node, number, wide, name}. Rows are shown in the order given at first.
function table(caption, columns, rows, { sortable = false, mark = null } = {}) {
  const body = make("tbody");
  let sorted = rows;
  const fill = () => {
    body.replaceChildren(
      ...sorted.map((row) => {
        const cells = columns.map((column) => {
          const shown = column.show ? column.show(row) : count(column.value(row));
          return make("td", { class: [column.number && "n", column.wide && "wide", column.class].filter(Boolean).join(" ") || null }, shown);
        });
        const line = make("tr", {}, ...cells);
        if (mark) mark(line, row);
        return line;
      }),
    );
  };
  const heads = columns.map((column) => {
    const head = make("th", { scope: "col", class: [column.number && "n", column.wide && "wide"].filter(Boolean).join(" ") || null });
    if (!sortable || !column.value) {
      head.append(column.title);
      return head;
    }
    const sort = () => {
      const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const key = (row) => column.value(row) ?? (column.number ? -1 : "");
      sorted = [...rows].sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
      fill();
    };
    head.append(make("button", { type: "button", onclick: sort }, column.title));
    return head;
  });
  fill();
  const element = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...heads)), body);
  const region = make("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, element);
  region.refill = fill;
  return region;
}

// One bar of parts: [name, value, colour name, shown value].
function stack(label, parts) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  const shown = parts.filter(([, value]) => value > 0);
  const bar = make(
    "div",
    { class: "stack", role: "img", "aria-label": `${label}: ${shown.map(([name, value]) => `${name} ${share(value, whole)}`).join(", ")}` },
    ...shown.map(([, value, tint]) => make("i", { style: { width: `${(100 * value) / whole}%`, background: `var(--${tint})` } })),
  );
  const legend = make(
    "ul",
    { class: "legend" },
    ...parts
      .filter(([, value]) => value > 0)
      .map(([name, value, tint, text]) =>
        make("li", {}, make("i", { style: { background: `var(--${tint})` } }), `${name} `, make("strong", {}, text), ` (${share(value, whole)})`),
      ),
  );
  return make("div", {}, bar, legend);
}

function section(id, title, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
}

function frame(title, subtitle, sections) {
  const links = sections.map((each) => make("li", {}, make("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
  document.body.append(
    make("a", { class: "skip", href: `#${sections[0].id}` }, "Skip to the content"),
    make("header", {}, make("h1", {}, title), ...subtitle),
    make("nav", { "aria-label": "Sections" }, make("ul", {}, ...links)),
    make("main", {}, ...sections),
  );
}
