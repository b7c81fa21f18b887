// Lines over ten minutes, as SVG.

import { make, makeSvg } from "./dom.js";

const WIDTH = 600, SPAN = 600;

/** The path of a line, in WIDTH x height, whose right end is now; null makes a gap. */
function trace(times, values, top, height) {
  const end = times.at(-1) ?? 0;
  let line = "", area = "", from = null, x = 0;
  const close = () => { if (from !== null) area += `L${x.toFixed(1)} ${height}L${from.toFixed(1)} ${height}Z`; from = null; };
  times.forEach((time, index) => {
    const value = values[index];
    if (value === null || value === undefined || time < end - SPAN) return close();
    x = WIDTH * (1 - (end - time) / SPAN);
    const point = `${x.toFixed(1)} ${(height - (height - 2) * Math.min(1, value / top)).toFixed(1)}`;
    line += (from === null ? "M" : "L") + point;
    area += (from === null ? "M" : "L") + point;
    from ??= x;
  });
  close();
  return { line, area };
}

export class Plot {
  constructor(height) {
    this.height = height;
    this.area = makeSvg("path", { class: "area" });
    this.line = makeSvg("path", { class: "stroke" });
    this.element = makeSvg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
  }

  draw(times, values, top) {
    const { line, area } = trace(times, values, top, this.height);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

/** A number with its last ten minutes. Pointing at the line shows the value of that moment. */
export class Chart {
  constructor(label, format, { top = 0 } = {}) {
    Object.assign(this, { format, least: top, times: [], values: [] });
    this.plot = new Plot(48);
    this.cross = makeSvg("line", { class: "cross", y1: 0, y2: 48, visibility: "hidden" });
    this.plot.element.append(this.cross);
    this.moment = make("span");
    this.value = make("div", { class: "value" });
    this.element = make("div", { class: "chart" }, make("h2", {}, label, this.moment), this.value, this.plot.element);
    this.plot.element.addEventListener("pointermove", (event) => this.point(event));
    this.plot.element.addEventListener("pointerleave", () => this.leave());
  }

  update(now, note, times, values) {
    Object.assign(this, { now, note, times, values });
    const known = values.filter((value) => value !== null && value !== undefined);
    this.plot.draw(times, values, Math.max(this.least, ...known, 1e-9));
    if (!this.pointed) this.show(now, note);
  }

  show(value, note) {
    this.value.replaceChildren(this.format(value), note ? make("small", {}, note) : "");
  }

  point(event) {
    const box = this.plot.element.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const at = this.times.at(-1) - SPAN * (1 - share);
    const index = this.times.findIndex((time) => time >= at);
    if (index < 0 || this.times[0] > at + 2) return this.leave();
    this.pointed = true;
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, WIDTH * share);
    this.cross.setAttribute("visibility", "visible");
    this.moment.textContent = new Date(1000 * this.times[index]).toLocaleTimeString();
    this.show(this.values[index], "");
  }

  leave() {
    this.pointed = false;
    this.cross.setAttribute("visibility", "hidden");
    this.moment.textContent = "";
    this.show(this.now, this.note);
  }
}
