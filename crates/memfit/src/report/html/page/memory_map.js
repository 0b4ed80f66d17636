// The memory map over time: addresses upwards, the timeline's axis across, every listed allocation a rectangle.

const MAP_TOP = 6;
const MAP_BOTTOM = 20;

function drawMemory(view, canvas) {
  const frame = prepared(canvas);
  const { pen, width, height } = frame;
  const { inks, device, lowPlace, highPlace } = view;
  const bottom = height - MAP_BOTTOM;
  const right = width - MARGIN.right;
  const y = (place) => bottom - ((place - lowPlace) / (highPlace - lowPlace)) * (bottom - MAP_TOP);
  const [from, to] = [view.momentAt(view.from), view.momentAt(view.to)];
  const scale = (right - MARGIN.left) / (view.to - view.from);
  const x = view.axis === "event"
    ? (moment) => MARGIN.left + (moment - view.from) * scale
    : (moment) => MARGIN.left + (view.valueAt(moment) - view.from) * scale;
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN.left, MAP_TOP, right - MARGIN.left, bottom - MAP_TOP);
  pen.clip();
  const rectangle = (things, i) => {
    const low = Math.max(x(things.birth[i]), MARGIN.left - 4);
    const high = Math.min(x(things.end[i]), right + 4);
    const top = y(things.place[i] + things.size[i]);
    return [low, top, Math.max(high - low, 0.4), Math.max(y(things.place[i]) - top, 0.4)];
  };
  const isVisible = (things, i) =>
    things.birth[i] < to && things.end[i] > from && things.place[i] < highPlace && things.place[i] + things.size[i] > lowPlace;
  const { segments, lives } = device;
  pen.fillStyle = inks.free;
  for (let i = 0; i < segments.count; i++) {
    if (isVisible(segments, i)) pen.fillRect(...rectangle(segments, i));
  }
  // One pass a band, so that the ink changes seldom.
  const named = device.head.bands;
  const byBand = Array.from({ length: named + 1 }, () => []);
  for (let i = 0; i < lives.count; i++) {
    if (isVisible(lives, i)) byBand[device.band(lives.owner[i])].push(i);
  }
  const frames = new Path2D();
  byBand.forEach((positions, band) => {
    pen.fillStyle = inks.band(band, named);
    pen.globalAlpha = view.owner < 0 || device.band(view.owner) === band ? 1 : 0.2;
    for (const i of positions) {
      const place = rectangle(lives, i);
      pen.fillRect(...place);
      if (place[2] > 5 && place[3] > 4) frames.rect(...place);
    }
  });
  pen.globalAlpha = 1;
  pen.strokeStyle = inks.paper;
  pen.lineWidth = 0.7;
  pen.stroke(frames);
  drawRangeEnds(view, pen, y, right, bottom);
  if (view.pinned >= 0) {
    const [px, py, pw, ph] = rectangle(lives, view.pinned);
    pen.strokeStyle = inks.paper;
    pen.lineWidth = 5;
    pen.strokeRect(px, py, Math.max(pw, 2), Math.max(ph, 2));
    pen.strokeStyle = inks.ink;
    pen.lineWidth = 2.5;
    pen.strokeRect(px, py, Math.max(pw, 2), Math.max(ph, 2));
  }
  pen.restore();
  drawPlaceAxis(view, frame, y, bottom);
  drawTimeAxis(view, frame, bottom);
  drawCursor(view, frame, MAP_TOP, bottom);
  canvas.setAttribute(
    "aria-label",
    `Memory map: ${integer(byBand.reduce((sum, band) => sum + band.length, 0))} allocations in ` +
      `${bytes(highPlace - lowPlace)} of address ranges over the same stretch as the timeline.`,
  );
}

/** Where one reserved range ends and another begins, as far as there is room to tell them apart. */
function drawRangeEnds({ device, inks }, pen, y, right, bottom) {
  pen.strokeStyle = inks.ink;
  pen.lineWidth = 1;
  pen.beginPath();
  let last = Infinity;
  for (const range of device.ranges) {
    const at = Math.round(y(range.offset)) + 0.5;
    if (last - at > 8 && at > MAP_TOP && at < bottom) {
      pen.moveTo(MARGIN.left, at);
      pen.lineTo(right, at);
    }
    last = at;
  }
  pen.stroke();
}

function drawPlaceAxis(view, { pen }, y, bottom) {
  const { inks, lowPlace, highPlace } = view;
  const [unit, size] = UNITS.find((candidate) => highPlace - lowPlace >= 2 * candidate[1]) ?? ["B", 1];
  let [value, step] = ticks(lowPlace / size, highPlace / size, Math.max(2, (bottom - MAP_TOP) / 45));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.fillStyle = inks.quiet;
  pen.textAlign = "right";
  for (; value * size <= highPlace; value += step) {
    pen.fillText(`${value.toFixed(digits)} ${unit}`, MARGIN.left - 6, Math.max(y(value * size), MAP_TOP + 6));
  }
}

/** The allocation under a pixel, or -1. */
function lifeUnder(view, canvas, x, yPixel) {
  const bottom = canvas.clientHeight - MAP_BOTTOM;
  const part = (bottom - yPixel) / (bottom - MAP_TOP);
  const place = view.lowPlace + part * (view.highPlace - view.lowPlace);
  return view.device.lifeAt(view.momentAtX(x, canvas.clientWidth), place);
}

/** Zooms the addresses around a pixel. */
function zoomPlaces(view, canvas, yPixel, factor) {
  const bottom = canvas.clientHeight - MAP_BOTTOM;
  const span = view.highPlace - view.lowPlace;
  const centre = view.lowPlace + ((bottom - yPixel) / (bottom - MAP_TOP)) * span;
  const whole = view.device.addressBytes;
  const size = Math.min(Math.max(span * factor, 4096), whole);
  const low = Math.min(Math.max(centre - ((centre - view.lowPlace) / span) * size, 0), whole - size);
  view.set({ lowPlace: low, highPlace: low + size });
}
