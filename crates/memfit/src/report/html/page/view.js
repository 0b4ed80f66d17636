// What is shown: the stretch of the axis, the cursor, what is pinned. Views draw from it and change it; a change redraws
// all of them once, before the next frame.

/** Room for the axes around a plot, in CSS pixels. */
const MARGIN = { left: 74, right: 12 };

class View {
  constructor(device) {
    this.device = device;
    this.inks = new Inks();
    this.listeners = [];
    this.axis = "event";
    this.from = 0;
    this.to = this.length;
    this.lowPlace = 0;
    this.highPlace = device.addressBytes;
    this.fitHeight = false;
    this.cursor = null;
    this.pinned = -1;
    this.owner = -1;
    this.moment = device.head.peak.moment;
    this.scheduled = false;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  /** Takes over changes and redraws before the next frame. */
  set(changes) {
    Object.assign(this, changes);
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      for (const listener of this.listeners) listener(this);
    });
  }

  /** Length of the whole axis: moments, or microseconds. */
  get length() {
    const { moments, first_time_us: first, last_time_us: last } = this.device.head;
    return this.axis === "time" ? Math.max(1, last - first) : Math.max(1, moments);
  }

  momentAt(value) {
    return this.axis === "time" ? this.device.momentAtTime(value) : value;
  }

  valueAt(moment) {
    return this.axis === "time" ? this.device.timeAt(moment) : moment;
  }

  x(value, width) {
    return MARGIN.left + ((value - this.from) / (this.to - this.from)) * (width - MARGIN.left - MARGIN.right);
  }

  valueAtX(x, width) {
    return this.from + ((x - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (this.to - this.from);
  }

  /** The moment under a pixel; the state at `m` is drawn from `m` to `m + 1`. */
  momentAtX(x, width) {
    const moment = Math.floor(this.momentAt(this.valueAtX(x, width)));
    return Math.min(Math.max(moment, 0), this.device.head.moments - 1);
  }

  show(from, to) {
    const least = this.axis === "time" ? 1 : 4;
    const width = Math.min(Math.max(to - from, least), this.length);
    const start = Math.min(Math.max((from + to) / 2 - width / 2, 0), this.length - width);
    this.set({ from: start, to: start + width });
  }

  zoom(factor, centre = (this.from + this.to) / 2) {
    this.show(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  move(part) {
    const step = part * (this.to - this.from);
    this.show(this.from + step, this.to + step);
  }

  /** Shows a stretch of moments around one, or the whole trace when that is shorter. */
  showMoment(moment, around = Math.max(64, this.device.head.moments / 200)) {
    this.show(this.valueAt(moment - around), this.valueAt(moment + around));
  }

  setAxis(axis) {
    const [from, to] = [this.momentAt(this.from), this.momentAt(this.to)];
    this.axis = axis;
    this.show(this.valueAt(from), this.valueAt(to));
  }

  momentText(moment) {
    const { device } = this;
    const place = moment === 0 ? "before the first event" : `after event ${integer(moment - 1)}`;
    return device.hasTimes && moment > 0 ? `${place}, ${duration(device.timeAt(moment))}` : place;
  }
}

/** Round steps for an axis: `[first, step]` so that about `count` ticks fall into from..to. */
function ticks(from, to, count) {
  const rough = Math.max((to - from) / count, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((candidate) => candidate >= rough);
  return [Math.ceil(from / step) * step, step];
}

/** The ticks below an axis of moments or time. */
function drawTimeAxis(view, { pen, width }, y) {
  const { inks } = view;
  const inSeconds = view.axis === "time";
  let [value, step] = ticks(view.from, view.to, Math.max(2, width / 130));
  if (!inSeconds && step < 1) [value, step] = [Math.ceil(view.from), 1];
  pen.fillStyle = inks.quiet;
  pen.strokeStyle = inks.line;
  pen.textAlign = "center";
  for (; value <= view.to; value += step) {
    const x = view.x(value, width);
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x, y + 5);
    pen.stroke();
    const text = inSeconds ? secondsText(value, step) : integer(value);
    if (x > MARGIN.left + 10 && x < width - 30) pen.fillText(text, x, y + 13);
  }
  pen.textAlign = "right";
  pen.fillText(inSeconds ? "time" : "event", MARGIN.left - 6, y + 13);
}

function secondsText(value, step) {
  const [size, unit] = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return `${(value / size).toFixed(digits)} ${unit}`;
}

/** A scale for bytes with ticks at round numbers of the fitting unit. */
function drawBytesAxis(view, { pen, width }, top, bottom, highest, name) {
  const { inks } = view;
  const [unit, size] = UNITS.find((candidate) => highest >= 2 * candidate[1]) ?? ["B", 1];
  const [, step] = ticks(0, highest / size, Math.max(2, (bottom - top) / 45));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.strokeStyle = inks.line;
  pen.lineWidth = 1;
  pen.fillStyle = inks.quiet;
  pen.textAlign = "right";
  for (let value = 0; value * size <= highest; value += step) {
    const y = Math.round(bottom - ((value * size) / highest) * (bottom - top)) + 0.5;
    pen.beginPath();
    pen.moveTo(MARGIN.left, y);
    pen.lineTo(width - MARGIN.right, y);
    pen.stroke();
    pen.fillText(`${value.toFixed(digits)} ${unit}`, MARGIN.left - 6, y);
  }
  if (name) {
    pen.textAlign = "left";
    pen.fillText(name, MARGIN.left + 4, top - 8);
  }
}
