// A device's timeline as the page asks it: the highest moment of a stretch, who was there at a moment, what
// a stack says. Nothing here draws.

/** Columns over equal stretches of moments, with a pyramid for the maximum of any range of them. */
class Grid {
  constructor(head, bands, reader) {
    Object.assign(this, head);
    const n = head.count;
    const offset = reader.plain(n);
    this.at = offset.map((value, i) => head.first + i * head.width + value);
    this.time = reader.differences(n);
    this.allocated = reader.differences(n, head.unit);
    this.active = reader.differences(n, head.unit);
    this.reserved = reader.differences(n, head.unit);
    this.bands = [];
    const rest = Float64Array.from(this.allocated);
    for (let b = 0; b < bands; b++) {
      const band = reader.differences(n, head.unit);
      for (let i = 0; i < n; i++) rest[i] -= band[i];
      this.bands.push(band);
    }
    this.bands.push(rest.map((value) => Math.max(0, value)));
    this.highest = Grid.#pyramid(this.allocated);
    this.highestActive = Grid.#pyramid(this.active);
    this.highestReserved = Grid.#pyramid(this.reserved);
  }

  get end() {
    return this.first + this.count * this.width;
  }

  /** Level k holds, for each 2^k columns, the index of the first highest one. */
  static #pyramid(values) {
    const levels = [Uint32Array.from(values, (_, i) => i)];
    for (let below = levels[0]; below.length > 1; below = levels.at(-1)) {
      const level = new Uint32Array(Math.ceil(below.length / 2));
      for (let i = 0; i < level.length; i++) {
        const left = below[2 * i];
        const right = below[Math.min(2 * i + 1, below.length - 1)];
        level[i] = values[right] > values[left] ? right : left;
      }
      levels.push(level);
    }
    return levels;
  }

  /** The first highest of the columns from..to. */
  static #maximum(levels, values, from, to) {
    let best = levels[0][from];
    for (let i = from; i < to; ) {
      let level = 0;
      while (level + 1 < levels.length && i % (2 << level) === 0 && i + (2 << level) <= to) level++;
      const candidate = levels[level][i >> level];
      if (values[candidate] > values[best]) best = candidate;
      i += 1 << level;
    }
    return best;
  }

  /** The highest column among those that touch the moments from..to, and the highest active and reserved. */
  query(from, to) {
    const clamp = (c) => Math.min(Math.max(c, 0), this.count - 1);
    const first = clamp(Math.floor((from - this.first) / this.width));
    const last = clamp(Math.ceil((to - this.first) / this.width) - 1);
    const end = Math.max(first, last) + 1;
    const column = Grid.#maximum(this.highest, this.allocated, first, end);
    const active = Grid.#maximum(this.highestActive, this.active, first, end);
    const reserved = Grid.#maximum(this.highestReserved, this.reserved, first, end);
    return {
      grid: this,
      column,
      moment: this.at[column],
      allocated: this.allocated[column],
      active: this.active[active],
      reserved: this.reserved[reserved],
    };
  }
}

/** Everything the page knows about one device. */
class Device {
  static async load(head, number) {
    const device = new Device();
    const [columns, lives, segments, texts] = await Promise.all([
      inflate(`columns-${number}`),
      inflate(`lives-${number}`),
      inflate(`segments-${number}`),
      inflateJson(`texts-${number}`),
    ]);
    device.head = head;
    device.texts = texts ?? { strings: [], frames: [], stacks: [] };
    const reader = new Reader(columns);
    device.grids = head.grids.map((grid) => new Grid(grid, head.bands, reader));
    device.lives = Device.#lives(head.lives, new Reader(lives));
    device.segments = Device.#segments(head.segments, new Reader(segments));
    device.ranges = device.#addressRanges();
    device.#placeLives();
    const highest = device.grids[0].query(0, head.moments);
    device.highest = Math.max(highest.reserved, highest.active, highest.allocated, 1);
    device.hasTimes = head.last_time_us > head.first_time_us;
    return device;
  }

  static #lives({ listed, unit }, reader) {
    const birth = reader.differences(listed);
    const end = reader.plain(listed).map((length, i) => birth[i] + length);
    const released = reader.plain(listed).map((waiting, i) => end[i] - waiting);
    const size = reader.plain(listed, unit);
    const address = reader.differences(listed, unit);
    const stack = reader.plain(listed);
    const owner = reader.plain(listed);
    return { count: listed, birth, end, released, size, address, stack, owner };
  }

  static #segments({ listed, unit }, reader) {
    const birth = reader.differences(listed);
    const end = reader.plain(listed).map((length, i) => birth[i] + length);
    const size = reader.plain(listed, unit);
    const address = reader.differences(listed, unit);
    const stream = reader.plain(listed);
    const pool = reader.plain(listed);
    const flags = reader.plain(listed);
    return { count: listed, birth, end, size, address, stream, pool, flags };
  }

  /** The address ranges that were ever reserved, joined where they touch, with their place on the axis. */
  #addressRanges() {
    const pieces = [];
    const add = ({ count, address, size }) => {
      for (let i = 0; i < count; i++) pieces.push([address[i], address[i] + size[i]]);
    };
    add(this.segments);
    add(this.lives);
    pieces.sort((a, b) => a[0] - b[0]);
    const ranges = [];
    let offset = 0;
    for (const [start, end] of pieces) {
      const last = ranges.at(-1);
      if (last && start <= last.end) {
        if (end > last.end) {
          offset += end - last.end;
          last.end = end;
        }
      } else {
        ranges.push({ start, end, offset });
        offset += end - start;
      }
    }
    this.addressBytes = Math.max(offset, 1);
    return ranges;
  }

  /** Where an address is on the axis that leaves out what was never reserved. */
  place(address) {
    let low = 0;
    let high = this.ranges.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.ranges[middle].start <= address) low = middle;
      else high = middle - 1;
    }
    const range = this.ranges[low];
    return range ? range.offset + Math.min(Math.max(address - range.start, 0), range.end - range.start) : 0;
  }

  #placeLives() {
    this.lives.place = this.lives.address.map((address) => this.place(address));
    this.segments.place = this.segments.address.map((address) => this.place(address));
  }

  /** The highest moment in from..to, from the finest columns that cover it. */
  query(from, to) {
    let best = this.grids[0];
    for (const grid of this.grids) {
      if (grid.width < best.width && grid.first <= from && to <= grid.end) best = grid;
    }
    return best.query(from, to);
  }

  /** Microseconds since the first event; exact at the columns' moments, between them in proportion. */
  timeAt(moment) {
    const { at, time } = this.grids[0];
    return interpolate(at, time, moment) - this.head.first_time_us;
  }

  momentAtTime(microseconds) {
    const { at, time } = this.grids[0];
    return interpolate(time, at, microseconds + this.head.first_time_us);
  }

  /** Positions of the listed allocations whose block is not free at a moment. */
  livesAt(moment) {
    return positionsAt(this.lives, moment);
  }

  segmentsAt(moment) {
    return positionsAt(this.segments, moment);
  }

  /** The listed allocation that covers an address on the axis at a moment; -1 when there is none. */
  lifeAt(moment, place) {
    const { count, birth, end, place: start, size } = this.lives;
    for (let i = count - 1; i >= 0; i--) {
      if (birth[i] <= moment && moment < end[i] && start[i] <= place && place < start[i] + size[i]) return i;
    }
    return -1;
  }

  get isComplete() {
    return this.head.lives.listed === this.head.lives.total;
  }

  ownerName(owner) {
    return this.head.owners[owner]?.name ?? "other owners";
  }

  /** The letter of an owner's band; owners without one share the last band's mark. */
  ownerLetter(owner) {
    return owner < this.head.bands ? String.fromCharCode(65 + owner) : "…";
  }

  band(owner) {
    return Math.min(owner, this.head.bands);
  }

  /** The frames of a stack, innermost first, and how many outer ones were cut; null without text. */
  stack(number) {
    const row = this.texts.stacks[number];
    if (!row) return null;
    const { strings, frames } = this.texts;
    return {
      cut: row[0],
      frames: row.slice(1).map((frame) => ({
        file: strings[frames[3 * frame]],
        name: strings[frames[3 * frame + 1]],
        line: frames[3 * frame + 2],
      })),
    };
  }
}

function positionsAt({ count, birth, end }, moment) {
  const positions = [];
  for (let i = 0; i < count && birth[i] <= moment; i++) {
    if (moment < end[i]) positions.push(i);
  }
  return positions;
}

/** y at x between the points of two rising columns. */
function interpolate(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return 0;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const width = xs[high] - xs[low];
  return width > 0 ? ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / width : ys[low];
}
