// The timeline: a canvas that draws what is in sight.
"use strict";

const TRACK = 13, SPARSE = 7, TINY = 4, HEAD = 24, AXIS = 26, GAP = 5, NARROW = 620, LABEL = 178;
// A bar, as it comes: [track, start, length, number of its name, how many it stands for, requests, facts].
const [PLACE, START, LENGTH, NAME, MANY, REQUESTS, FACTS] = [0, 1, 2, 3, 4, 5, 6];

function barName(row, bar) {
  const name = row.process.names[bar[NAME]];
  if (bar[MANY] === 1) return name;
  return name === "several" ? `${count(bar[MANY])} bars` : `${count(bar[MANY])} × ${name}`;
}

class Timeline {
  constructor(picture) {
    this.picture = picture;
    this.filter = null;
    this.chosen = null;
    this.canvas = make("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label": "Timeline of callbacks, layer hooks and transfers. Arrow keys move, plus and minus zoom, n and p step through bars.",
    });
    this.space = make("div", { style: { position: "relative" } });
    this.space.append(this.canvas);
    this.element = make("div", { class: "timeline" }, this.space);
    this.rows = this.layOut();
    this.fit();
    new ResizeObserver(() => this.resize()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  // -- where things stand ----------------------------------------------------------------------------------------------

  layOut() {
    const rows = [];
    for (const process of this.picture.processes) {
      rows.push({ process, height: HEAD });
      for (const lane of process.lanes) {
        const size = lane.tracks > 24 ? TINY : lane.tracks > 6 ? SPARSE : TRACK;
        const longest = lane.bars.reduce((most, bar) => Math.max(most, bar[LENGTH]), 0);
        rows.push({ process, lane, size, longest, height: lane.tracks * size + GAP });
      }
    }
    return rows;
  }

  place() {
    this.isNarrow = this.width < NARROW;
    this.left = this.isNarrow ? 6 : LABEL;
    let top = AXIS;
    for (const row of this.rows) {
      row.top = top;
      row.head = row.lane && this.isNarrow ? 14 : 0;
      top += row.height + row.head;
    }
    this.bottom = top + 6;
  }

  resize() {
    const width = this.element.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.width = width;
    this.place();
    this.element.style.height = `${this.bottom + 2}px`;
    const height = this.element.clientHeight;
    if (width === this.drawnWidth && height === this.height) return;
    this.drawnWidth = width;
    this.height = height;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.space.style.height = `${this.bottom}px`;
    this.paint();
  }

  // -- what is in sight ------------------------------------------------------------------------------------------------

  look(begin, end) {
    const { begin: first, end: last } = this.picture;
    const whole = Math.max(1, last - first) * 1.04;
    const span = Math.min(whole, Math.max(20, end - begin));
    const edge = whole * 0.02;
    this.begin = Math.max(first - edge, Math.min(begin, last + edge - span));
    this.end = this.begin + span;
    this.paint();
    this.onlook?.(this.begin, this.end);
  }

  fit() {
    this.look(this.picture.begin - 1e18, this.picture.begin - 1e18 + 1e19);
  }

  zoom(factor, at = (this.begin + this.end) / 2) {
    this.look(at - (at - this.begin) * factor, at + (this.end - at) * factor);
  }

  move(part) {
    const step = (this.end - this.begin) * part;
    this.look(this.begin + step, this.end + step);
  }

  x(at) {
    return this.left + ((at - this.begin) / (this.end - this.begin)) * (this.width - this.left);
  }

  time(x) {
    return this.begin + ((x - this.left) / (this.width - this.left)) * (this.end - this.begin);
  }

  // The bars of a lane that may be in sight: they lie in the order of their starts.
  *inSight(row) {
    const bars = row.lane.bars;
    let low = 0, high = bars.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars[middle][START] < this.begin - row.longest) low = middle + 1;
      else high = middle;
    }
    for (let at = low; at < bars.length && bars[at][START] <= this.end; at++)
      if (bars[at][START] + bars[at][LENGTH] >= this.begin) yield bars[at];
  }

  // Whether a bar is of the requests that are filtered by; null where it names none (a pass, a layer hook).
  concerns(bar) {
    if (!bar[REQUESTS].length) return null;
    return bar[REQUESTS].some((key) => this.filter.has(key) || key === "+");
  }

  setFilter(keys) {
    this.filter = keys;
    if (keys) {
      let first = Infinity, last = -Infinity;
      for (const row of this.rows)
        for (const bar of row.lane?.bars ?? [])
          if (bar[REQUESTS].some((key) => keys.has(key))) {
            first = Math.min(first, bar[START]);
            last = Math.max(last, bar[START] + bar[LENGTH]);
          }
      if (first < last) this.look(first - (last - first) * 0.05, last + (last - first) * 0.05);
    }
    this.paint();
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  paint() {
    if (this.due || !this.width) return;
    this.due = requestAnimationFrame(() => {
      this.due = 0;
      this.draw();
    });
  }

  draw() {
    const context = this.canvas.getContext("2d");
    const scale = devicePixelRatio || 1;
    const tints = {};
    const tint = (name) => (tints[name] ??= colour(name));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.fillStyle = tint("card");
    context.fillRect(0, 0, this.width, this.height);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    const scroll = this.element.scrollTop;
    this.grid(context, tint);
    for (const row of this.rows) {
      const top = row.top - scroll;
      if (top + row.height + row.head < AXIS || top > this.height) continue;
      if (row.lane) this.lane(context, tint, row, top);
      else {
        context.fillStyle = tint("soft");
        context.fillRect(0, top, this.width, HEAD - 4);
        context.fillStyle = tint("text");
        context.font = "600 12px system-ui, sans-serif";
        context.fillText(row.process.name, 8, top + HEAD / 2 - 2);
        context.font = "11.5px system-ui, sans-serif";
      }
    }
    this.axis(context, tint);
  }

  step() {
    const most = Math.max(2, (this.width - this.left) / 110);
    const raw = (this.end - this.begin) / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((times) => times * power).find((each) => each >= raw);
  }

  *ticks() {
    const step = Math.max(1, this.step());
    // Adding 0 makes a 0 of a -0, which would be shown with its sign.
    for (let at = Math.ceil(this.begin / step) * step + 0; at <= this.end; at += step) yield at;
  }

  grid(context, tint) {
    context.fillStyle = tint("line");
    for (const at of this.ticks()) context.fillRect(Math.round(this.x(at)), AXIS, 1, this.height);
  }

  axis(context, tint) {
    context.fillStyle = tint("card");
    context.fillRect(0, 0, this.width, AXIS - 3);
    context.fillStyle = tint("line");
    context.fillRect(0, AXIS - 4, this.width, 1);
    context.fillStyle = tint("muted");
    for (const at of this.ticks()) {
      const text = this.tick(at);
      const x = this.x(at);
      if (x + context.measureText(text).width < this.width) context.fillText(text, Math.max(2, x + 3), AXIS / 2 - 2);
    }
    if (!this.isNarrow) {
      context.fillStyle = tint("card");
      context.fillRect(0, 0, this.left - 1, AXIS - 4);
      context.fillStyle = tint("muted");
      context.fillText("time since the start", 8, AXIS / 2 - 2);
    }
  }

  // As many digits as tell one tick from the next.
  tick(at) {
    const step = this.step();
    const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, each]) => step >= each * 0.1) ?? ["ns", 1];
    const shown = Math.max(0, -Math.floor(Math.log10(step / size)));
    return `${(at / size).toLocaleString("en-US", { minimumFractionDigits: shown, maximumFractionDigits: shown })} ${unit}`;
  }

  lane(context, tint, row, top) {
    const own = tint(row.lane.row);
    const bad = tint("bad");
    const edges = new Array(row.lane.tracks).fill(-1);
    const isMoments = row.lane.row === "events";
    for (const bar of this.inSight(row)) {
      const begins = this.x(bar[START]);
      const ends = this.x(bar[START] + bar[LENGTH]);
      const error = bar[FACTS].error !== undefined;
      const from = Math.max(this.left, Math.round(begins * 2) / 2);
      const size = Math.max(isMoments ? 3 : 1.5, Math.min(ends, this.width) - from);
      const isChosen = this.chosen && this.chosen.bar === bar;
      const fits = this.filter ? this.concerns(bar) : true;
      // What lies within the same pixel is drawn once.
      if (from + size <= edges[bar[PLACE]] + 0.6 && !error && !isChosen && !(this.filter && fits)) continue;
      edges[bar[PLACE]] = from + size;
      const y = top + row.head + bar[PLACE] * row.size;
      const tall = row.size - 2;
      context.globalAlpha = fits === false ? 0.13 : fits === null ? 0.45 : 1;
      context.fillStyle = own;
      context.fillRect(from, y, size, tall);
      if (bar[MANY] > 1 && size > 3) this.hatch(context, tint, from, y, size, tall);
      if (error) {
        context.fillStyle = bad;
        context.fillRect(from, y + tall - 3, Math.max(3, size), 3);
      }
      if (size > 46 && row.size === TRACK && fits !== false) this.write(context, tint, row, bar, from, y, size, tall);
      context.globalAlpha = 1;
      if (isChosen) {
        context.strokeStyle = tint("text");
        context.lineWidth = 2;
        context.strokeRect(from - 1, y - 1, size + 2, tall + 2);
      }
    }
    this.label(context, tint, row, top);
  }

  label(context, tint, row, top) {
    if (this.isNarrow) {
      context.fillStyle = tint("muted");
      context.fillText(row.lane.label, 8, top + 7);
      return;
    }
    context.fillStyle = tint("card");
    context.fillRect(0, top, this.left - 1, row.height);
    context.fillStyle = tint("line");
    context.fillRect(this.left - 1, top, 1, row.height);
    context.fillStyle = tint(row.lane.row);
    context.fillRect(8, top, 4, row.height - GAP - 1);
    context.fillStyle = tint("text");
    context.fillText(row.lane.label, 18, top + Math.min(row.height - GAP, 40) / 2, this.left - 24);
  }

  hatch(context, tint, x, y, width, height) {
    const line = tint("card");
    if (this.hatched?.line !== line) {
      const tile = make("canvas", { width: 6, height: 6 });
      const stroke = tile.getContext("2d");
      stroke.strokeStyle = line;
      stroke.globalAlpha = 0.5;
      stroke.beginPath();
      for (const from of [-6, 0, 6]) {
        stroke.moveTo(from, 6);
        stroke.lineTo(from + 6, 0);
      }
      stroke.stroke();
      this.hatched = { line, pattern: context.createPattern(tile, "repeat") };
    }
    context.fillStyle = this.hatched.pattern;
    context.fillRect(x, y, width, height);
  }

  write(context, tint, row, bar, x, y, width, height) {
    const text = barName(row, bar);
    if (context.measureText(text).width > width - 6) return;
    context.fillStyle = tint("card");
    if (bar[MANY] > 1) {
      context.fillStyle = tint(row.lane.row);
      context.fillRect(x + 2, y, context.measureText(text).width + 4, height);
      context.fillStyle = tint("card");
    }
    context.font = "10.5px system-ui, sans-serif";
    context.fillText(text, x + 4, y + height / 2 + 0.5);
    context.font = "11.5px system-ui, sans-serif";
  }
}
