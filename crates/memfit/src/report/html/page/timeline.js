// The timeline: owners' bands stacked to the allocated bytes, the reserved line above them, marks for the peak, refused
// requests and annotations; and the overview with the brush.

const TOP = 42;
const BOTTOM = 22;

/** The highest moment under each pixel column of a stretch. */
function columnsOf(view, width) {
  const columns = [];
  for (let x = MARGIN.left; x < width - MARGIN.right; x++) {
    const from = view.momentAt(view.valueAtX(x, width));
    const to = view.momentAt(view.valueAtX(x + 1, width));
    columns.push(view.device.query(from, Math.max(to, from)));
  }
  return columns;
}

function drawTimeline(view, canvas) {
  const frame = prepared(canvas);
  const { pen, width, height } = frame;
  const { inks, device } = view;
  const bottom = height - BOTTOM;
  const columns = columnsOf(view, width);
  const most = columns.reduce((most, c) => Math.max(most, c.reserved, c.active, c.allocated), 1);
  const highest = (view.fitHeight ? most : device.highest) * 1.04;
  const y = (bytes) => bottom - (bytes / highest) * (bottom - TOP);
  drawBytesAxis(view, frame, TOP, bottom, highest, null);
  const named = device.head.bands;
  const heights = new Float64Array(columns.length);
  const letters = [];
  for (let band = 0; band <= named; band++) {
    pen.beginPath();
    for (let i = columns.length - 1; i >= 0; i--) pen.lineTo(MARGIN.left + i + 1, y(heights[i]));
    let widest = { bytes: 0, x: 0, y: 0 };
    for (let i = 0; i < columns.length; i++) {
      const bytes = columns[i].grid.bands[band][columns[i].column];
      const low = heights[i];
      heights[i] += bytes;
      pen.lineTo(MARGIN.left + i, y(heights[i]));
      pen.lineTo(MARGIN.left + i + 1, y(heights[i]));
      if (bytes > widest.bytes) widest = { bytes, x: MARGIN.left + i, y: (y(low) + y(heights[i])) / 2 };
    }
    pen.closePath();
    pen.globalAlpha = view.owner < 0 || device.band(view.owner) === band ? 1 : 0.25;
    pen.fillStyle = inks.band(band, named);
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = inks.paper;
    pen.lineWidth = 0.6;
    pen.stroke();
    if ((widest.bytes / highest) * (bottom - TOP) > 15) letters.push([device.ownerLetter(band), widest]);
  }
  for (const [letter, at] of letters) {
    label(pen, inks, letter, Math.min(Math.max(at.x, MARGIN.left + 12), width - 24), at.y);
  }
  // Every free waits for one event; only what waits visibly longer is worth a line.
  const isWaiting = (c) => y(c.allocated) - y(c.active) > 3;
  drawLine(pen, columns, y, (c) => c.active, inks.ink, [2, 3], isWaiting);
  drawLine(pen, columns, y, (c) => c.reserved, inks.ink, []);
  const last = columns.at(-1);
  if (last) label(pen, inks, "reserved", width - MARGIN.right - 4, y(last.reserved) - 9, { align: "right" });
  drawMarks(view, frame, y, bottom);
  drawTimeAxis(view, frame, bottom);
  drawCursor(view, frame, TOP, bottom);
  canvas.setAttribute(
    "aria-label",
    `Timeline from ${view.momentText(Math.floor(view.momentAt(view.from)))} to ` +
      `${view.momentText(Math.ceil(view.momentAt(view.to)) - 1)}; highest here ${bytes(Math.max(...columns.map((c) => c.allocated)))} allocated.`,
  );
}

/** A total as steps; `where` leaves out what another line already shows. */
function drawLine(pen, columns, y, value, colour, dash, where = () => true) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.setLineDash(dash);
  pen.beginPath();
  columns.forEach((column, i) => {
    if (!where(column)) return;
    const at = y(value(column));
    if (i === 0 || !where(columns[i - 1])) pen.moveTo(MARGIN.left + i, at);
    else pen.lineTo(MARGIN.left + i, at);
    pen.lineTo(MARGIN.left + i + 1, at);
  });
  pen.stroke();
  pen.setLineDash([]);
}

function drawMarks(view, { pen, width }, y, bottom) {
  const { device, inks } = view;
  const inside = (x) => x >= MARGIN.left - 1 && x <= width - MARGIN.right + 1;
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  drawAnnotations(view, pen, width);
  for (const refusal of device.head.refusals) {
    const x = view.x(view.valueAt(refusal.moment + 0.5), width);
    if (!inside(x)) continue;
    verticalLine(pen, x, TOP - 6, bottom, inks.alarm, [6, 3]);
    label(pen, inks, "▼ OOM", Math.min(x, width - 34), TOP - 12, { colour: inks.alarm });
  }
  const { moment, allocated_bytes: peak } = device.head.peak;
  const x = view.x(view.valueAt(moment + 0.5), width);
  if (inside(x)) {
    verticalLine(pen, x, TOP - 6, bottom, inks.ink, []);
    pen.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
    const align = x > width - 150 ? "right" : "left";
    label(pen, inks, `peak ${bytes(peak)}`, x + (align === "left" ? 4 : -4), Math.max(y(peak) - 10, TOP - 12), { align });
  }
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
}

function verticalLine(pen, x, top, bottom, colour, dash) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.4;
  pen.setLineDash(dash);
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, bottom);
  pen.stroke();
  pen.setLineDash([]);
}

/** Annotated stretches as brackets above the plot, with their names where there is room. */
function drawAnnotations(view, pen, width) {
  const { device, inks } = view;
  const open = new Map();
  const stretches = [];
  for (const { moment, is_start: isStart, name } of device.head.annotations) {
    if (isStart) open.set(name, moment);
    else if (open.has(name)) {
      stretches.push([open.get(name), moment, name]);
      open.delete(name);
    }
  }
  for (const [name, moment] of open) stretches.push([moment, device.head.moments, name]);
  let free = MARGIN.left;
  for (const [start, end, name] of stretches.sort((a, b) => a[0] - b[0])) {
    const left = Math.max(view.x(view.valueAt(start), width), MARGIN.left);
    const right = Math.min(view.x(view.valueAt(end), width), width - MARGIN.right);
    if (right < MARGIN.left || left > width - MARGIN.right) continue;
    pen.fillStyle = inks.accent;
    pen.fillRect(left, 13, Math.max(right - left, 1.5), 4);
    const room = pen.measureText(name).width;
    if (left >= free && left + room < width) {
      pen.fillStyle = inks.ink;
      pen.textAlign = "left";
      pen.fillText(name, left, 6);
      free = left + room + 8;
    }
  }
}

/** The chosen moment and the one under the pointer. */
function drawCursor(view, { pen, width }, top, bottom) {
  const { inks } = view;
  const at = (moment) => view.x(view.valueAt(moment + 0.5), width);
  const chosen = at(view.moment);
  if (chosen >= MARGIN.left && chosen <= width - MARGIN.right) {
    verticalLine(pen, chosen, top, bottom, inks.accent, [3, 2]);
    pen.fillStyle = inks.accent;
    pen.beginPath();
    pen.moveTo(chosen - 5, bottom + 6);
    pen.lineTo(chosen + 5, bottom + 6);
    pen.lineTo(chosen, bottom);
    pen.fill();
  }
  if (view.cursor !== null) verticalLine(pen, at(view.cursor), top, bottom, inks.quiet, [1, 2]);
}

/** The whole trace, with the part shown below framed. */
function drawOverview(view, canvas) {
  const frame = prepared(canvas);
  const { pen, width, height } = frame;
  const { inks, device } = view;
  const x = (value) => MARGIN.left + (value / view.length) * (width - MARGIN.left - MARGIN.right);
  const y = (bytes) => height - 4 - (bytes / device.highest) * (height - 10);
  const area = new Path2D();
  const line = new Path2D();
  area.moveTo(MARGIN.left, height - 4);
  for (let pixel = MARGIN.left; pixel < width - MARGIN.right; pixel++) {
    const value = (p) => ((p - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * view.length;
    const column = device.query(view.momentAt(value(pixel)), view.momentAt(value(pixel + 1)));
    area.lineTo(pixel, y(column.allocated));
    line.lineTo(pixel, y(column.reserved));
  }
  area.lineTo(width - MARGIN.right, height - 4);
  pen.fillStyle = inks.quiet;
  pen.fill(area);
  pen.strokeStyle = inks.ink;
  pen.stroke(line);
  pen.fillStyle = inks.paper;
  pen.globalAlpha = 0.7;
  pen.fillRect(MARGIN.left, 0, x(view.from) - MARGIN.left, height);
  pen.fillRect(x(view.to), 0, width - MARGIN.right - x(view.to), height);
  pen.globalAlpha = 1;
  pen.strokeStyle = inks.accent;
  pen.lineWidth = 2;
  pen.strokeRect(x(view.from), 1, Math.max(x(view.to) - x(view.from), 3), height - 2);
}

/** The owner whose band is at a height in the column of a moment; -1 above all of them. */
function bandAt(view, canvas, x, yPixel) {
  const width = canvas.clientWidth;
  const columns = view.fitHeight ? columnsOf(view, width) : [];
  const most = columns.reduce((most, c) => Math.max(most, c.reserved, c.active, c.allocated), 1);
  const highest = (view.fitHeight ? most : view.device.highest) * 1.04;
  const bottom = canvas.clientHeight - BOTTOM;
  let target = ((bottom - yPixel) / (bottom - TOP)) * highest;
  const from = view.momentAt(view.valueAtX(x, width));
  const column = view.device.query(from, view.momentAt(view.valueAtX(x + 1, width)));
  for (let band = 0; band <= view.device.head.bands && target >= 0; band++) {
    target -= column.grid.bands[band][column.column];
    if (target < 0) return { band, column };
  }
  return { band: -1, column };
}
