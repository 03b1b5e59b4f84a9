// A timeline that is moved and asked: wheel with Ctrl, pinch, drag, buttons and keys.
"use strict";

class PointedTimeline extends Timeline {
  constructor(picture, { onselect, describe }) {
    super(picture);
    this.onselect = onselect;
    this.describe = describe;
    this.pointers = new Map();
    this.tip = make("div", { class: "tip gone" });
    document.body.append(this.tip);
    this.listen();
  }

  rowAt(y) {
    const at = y + this.element.scrollTop;
    return this.rows.find((row) => row.lane && at >= row.top && at < row.top + row.height + row.head);
  }

  barAt(x, y, reach = 3) {
    const row = y > AXIS && x >= this.left - reach ? this.rowAt(y) : null;
    if (!row) return null;
    const track = Math.floor((y + this.element.scrollTop - row.top - row.head) / row.size);
    let best = null, distance = reach + 1;
    for (const bar of this.inSight(row)) {
      if (bar[PLACE] !== track) continue;
      const off = Math.max(0, this.x(bar[START]) - x, x - this.x(bar[START] + bar[LENGTH]));
      if (off < distance || (off === distance && best && bar[LENGTH] < best[LENGTH])) [best, distance] = [bar, off];
    }
    return best && { row, bar: best };
  }

  choose(found) {
    this.chosen = found;
    this.paint();
    this.onselect(found);
  }

  listen() {
    const { canvas } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, at(event));
      this.dragged = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = this.pointers.get(event.pointerId);
      const now = at(event);
      if (!before) return this.hover(event, now);
      if (this.pointers.size === 1) {
        this.dragged += Math.abs(now[0] - before[0]);
        if (this.dragged > 4) {
          canvas.setPointerCapture(event.pointerId);
          canvas.classList.add("dragging");
          this.move((before[0] - now[0]) / (this.width - this.left));
        }
      } else {
        const [other] = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const factor = Math.abs(before[0] - other) / Math.max(8, Math.abs(now[0] - other));
        this.dragged += 9;
        this.zoom(Math.min(2, Math.max(0.5, factor)), this.time(other));
      }
      this.pointers.set(event.pointerId, now);
      this.hide();
    });
    const release = (event) => {
      const isClick = this.pointers.has(event.pointerId) && event.type === "pointerup" && this.dragged <= 4;
      this.pointers.delete(event.pointerId);
      canvas.classList.remove("dragging");
      if (isClick) this.choose(this.barAt(...at(event), event.pointerType === "touch" ? 10 : 3));
    };
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, release);
    canvas.addEventListener("pointerleave", () => this.hide());
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(at(event)[0])));
    canvas.addEventListener(
      "wheel",
      (event) => {
        // The wheel alone scrolls lanes and page, as everywhere.
        if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), this.time(at(event)[0]));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) / 900);
        else return;
        event.preventDefault();
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.key(event.key)) return;
      event.preventDefault();
    });
    this.element.addEventListener("scroll", () => this.paint());
  }

  key(key) {
    switch (key) {
      case "ArrowLeft": this.move(-0.15); return true;
      case "ArrowRight": this.move(0.15); return true;
      case "+": case "=": this.zoom(0.6); return true;
      case "-": this.zoom(1 / 0.6); return true;
      case "0": case "Home": this.fit(); return true;
      case "n": this.walk(1); return true;
      case "p": this.walk(-1); return true;
      case "ArrowDown": this.change(1); return true;
      case "ArrowUp": this.change(-1); return true;
      case "Enter": this.closeUp(); return true;
      case "Escape": this.choose(null); return true;
    }
    return false;
  }

  lanes() {
    return this.rows.filter((row) => row.lane && row.lane.bars.length);
  }

  // The next bar of the chosen lane that the filter lets through.
  walk(step) {
    const row = this.chosen?.row ?? this.lanes()[0];
    const bars = row.lane.bars;
    let at = this.chosen ? bars.indexOf(this.chosen.bar) + step : bars.findIndex((bar) => bar[START] + bar[LENGTH] >= this.begin);
    while (bars[at] && this.filter && this.concerns(bars[at]) === false) at += step;
    if (bars[at]) this.show(row, bars[at]);
  }

  change(step) {
    const lanes = this.lanes();
    const now = this.chosen ? lanes.indexOf(this.chosen.row) : -1;
    const row = lanes[Math.max(0, Math.min(lanes.length - 1, now + step))];
    const middle = this.chosen ? this.chosen.bar[START] : (this.begin + this.end) / 2;
    const near = row.lane.bars.reduce((best, bar) => (Math.abs(bar[START] - middle) < Math.abs(best[START] - middle) ? bar : best));
    this.show(row, near);
  }

  show(row, bar) {
    const [begins, ends] = [bar[START], bar[START] + bar[LENGTH]];
    if (begins < this.begin || ends > this.end) {
      const half = Math.max((this.end - this.begin) / 2, bar[LENGTH] * 0.7);
      this.look((begins + ends) / 2 - half, (begins + ends) / 2 + half);
    }
    const view = this.element;
    if (row.top < view.scrollTop + AXIS) view.scrollTop = row.top - AXIS;
    else if (row.top + row.height + row.head > view.scrollTop + this.height) view.scrollTop = row.top + row.height + row.head - this.height;
    this.choose({ row, bar });
  }

  closeUp() {
    const bar = this.chosen?.bar;
    if (bar) this.look(bar[START] - bar[LENGTH] * 0.3 - 10, bar[START] + bar[LENGTH] * 1.3 + 10);
  }

  hover(event, [x, y]) {
    const found = event.pointerType === "touch" ? null : this.barAt(x, y);
    this.canvas.style.cursor = found ? "pointer" : "";
    if (!found) return this.hide();
    this.tip.textContent = this.describe(found);
    this.tip.classList.remove("gone");
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(innerWidth - box.width - 4, event.clientX + 12))}px`;
    this.tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  }

  hide() {
    this.tip.classList.add("gone");
  }
}
