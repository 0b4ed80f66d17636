// The segments at a moment, one row each: blocks to scale with their owner's pattern, free pieces hatched.

const ROW = 22;
const ROWS = 150;
const NAME_WIDTH = 210;

/** The segments at a moment with their blocks, largest first. */
function segmentsAt(device, moment) {
  const { segments, lives } = device;
  const rows = device.segmentsAt(moment).map((i) => ({
    start: segments.address[i],
    size: segments.size[i],
    stream: segments.stream[i],
    pool: segments.pool[i],
    isSmall: segments.flags[i] % 2 === 1,
    isExpandable: segments.flags[i] >= 2,
    blocks: [],
    used: 0,
  }));
  rows.sort((a, b) => a.start - b.start);
  const blocks = device.livesAt(moment).sort((a, b) => lives.address[a] - lives.address[b]);
  let row = 0;
  let outside = 0;
  for (const i of blocks) {
    while (row + 1 < rows.length && rows[row + 1].start <= lives.address[i]) row++;
    const segment = rows[row];
    if (segment && segment.start <= lives.address[i] && lives.address[i] < segment.start + segment.size) {
      segment.blocks.push(i);
      segment.used += lives.size[i];
    } else outside++;
  }
  for (const segment of rows) segment.gap = largestGap(segment, lives);
  rows.sort((a, b) => b.size - a.size || a.start - b.start);
  return { rows, outside };
}

function largestGap({ start, size, blocks }, lives) {
  let reached = start;
  let gap = 0;
  for (const i of blocks) {
    gap = Math.max(gap, lives.address[i] - reached);
    reached = Math.max(reached, lives.address[i] + lives.size[i]);
  }
  return Math.max(gap, start + size - reached);
}

function segmentName({ size, stream, pool, isSmall, isExpandable }) {
  const kind = isExpandable ? "expandable" : isSmall ? "small" : "large";
  return `${bytes(size)} ${kind}${stream ? ` stream ${hexadecimal(stream)}` : ""}${pool ? ` pool ${pool}` : ""}`;
}

function drawSegments(view, canvas, isCommonScale) {
  const { device, inks } = view;
  const { lives } = device;
  const { rows } = segmentsAt(device, view.moment);
  const shown = rows.slice(0, ROWS);
  canvas.style.height = `${Math.max(1, shown.length) * ROW + 4}px`;
  const { pen, width } = prepared(canvas);
  const left = width < 520 ? 110 : NAME_WIDTH;
  const largest = shown[0]?.size ?? 1;
  view.rows = shown.map((segment, number) => {
    const top = number * ROW + 2;
    const scale = (width - left - 4) / (isCommonScale ? largest : segment.size);
    const x = (address) => left + (address - segment.start) * scale;
    pen.fillStyle = inks.ink;
    pen.textAlign = "right";
    pen.fillText(segmentName(segment), left - 8, top + ROW / 2 - 2, left - 12);
    pen.fillStyle = inks.free;
    pen.fillRect(left, top, segment.size * scale, ROW - 5);
    for (const i of segment.blocks) {
      const band = device.band(lives.owner[i]);
      const [start, length] = [x(lives.address[i]), Math.max(lives.size[i] * scale, 0.5)];
      pen.globalAlpha = view.owner < 0 || device.band(view.owner) === band ? 1 : 0.25;
      pen.fillStyle = inks.band(band, device.head.bands);
      pen.fillRect(start, top, length, ROW - 5);
      pen.globalAlpha = 1;
      if (length > 3) {
        pen.strokeStyle = lives.released[i] <= view.moment ? inks.alarm : inks.paper;
        pen.setLineDash(lives.released[i] <= view.moment ? [3, 2] : []);
        pen.lineWidth = 0.8;
        pen.strokeRect(start, top, length, ROW - 5);
        pen.setLineDash([]);
      }
      if (length > 26) label(pen, inks, device.ownerLetter(lives.owner[i]), start + length / 2, top + ROW / 2 - 2);
    }
    for (const [start, size] of gapsOf(segment, lives)) {
      if (size * scale > 62) label(pen, inks, "free", x(start) + (size * scale) / 2, top + ROW / 2 - 2, { colour: inks.quiet });
    }
    const pinned = segment.blocks.includes(view.pinned) ? view.pinned : -1;
    pen.strokeStyle = inks.ink;
    pen.lineWidth = 1;
    pen.strokeRect(left, top, segment.size * scale, ROW - 5);
    if (pinned >= 0) {
      pen.lineWidth = 3;
      pen.strokeRect(x(lives.address[pinned]), top, Math.max(lives.size[pinned] * scale, 3), ROW - 5);
    }
    return { segment, top, left, scale };
  });
  return rows;
}

function gapsOf({ start, size, blocks }, lives) {
  const gaps = [];
  let reached = start;
  for (const i of blocks) {
    if (lives.address[i] > reached) gaps.push([reached, lives.address[i] - reached]);
    reached = Math.max(reached, lives.address[i] + lives.size[i]);
  }
  if (start + size > reached) gaps.push([reached, start + size - reached]);
  return gaps;
}

/** The block under a pixel of the segment map, or -1. */
function blockUnder(view, x, y) {
  const { lives } = view.device;
  const row = view.rows?.find(({ top }) => y >= top && y < top + ROW);
  if (!row) return -1;
  const address = row.segment.start + (x - row.left) / row.scale;
  const slack = 1 / row.scale;
  const hit = (i) => lives.address[i] - slack <= address && address < lives.address[i] + lives.size[i] + slack;
  return row.segment.blocks.find(hit) ?? -1;
}

/** What the map adds up to, in words; also what it cannot show. */
function describeSegments(view, rows) {
  const { device, moment } = view;
  const { lives } = device;
  let reserved = 0;
  let free = 0;
  let waiting = 0;
  let gap = 0;
  for (const segment of rows) {
    reserved += segment.size;
    free += segment.size - segment.used;
    gap = Math.max(gap, segment.gap);
    for (const i of segment.blocks) if (lives.released[i] <= moment) waiting += lives.size[i];
  }
  const used = reserved - free - waiting;
  const parts = [`${bytes(used)} allocated`];
  if (waiting > 0) parts.push(`${bytes(waiting)} awaiting another stream (dashed)`);
  const chosen = device.head.chosen.find((candidate) => candidate.moment === moment);
  const active = chosen ? chosen.active_bytes : device.query(moment, moment + 1).active;
  const missing = Math.max(0, active - (used + waiting));
  parts.push(`${bytes(free - Math.min(missing, free))} free (hatched)`);
  const notes = [];
  if (!device.isComplete && missing > 0) {
    const most = chosen ? "" : "at most ";
    notes.push(
      `${most}${bytes(missing)} of allocations at this moment are too small or too short to be listed in this file; they look free here.`,
    );
  }
  if (rows.length > ROWS) {
    const rest = rows.slice(ROWS);
    notes.push(`${integer(rest.length)} smaller segments with ${bytes(rest.reduce((sum, s) => sum + s.size, 0))} are not drawn.`);
  }
  const text =
    `${view.momentText(moment)}: ${counted(rows.length, "segment")}, ${bytes(reserved)} reserved = ${parts.join(" + ")}; ` +
    `largest free piece ${bytes(gap)}.`;
  return { text, notes: notes.join(" "), reserved };
}
