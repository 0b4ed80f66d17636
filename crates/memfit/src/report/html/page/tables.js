// Tables: owners and the allocations at a moment, sortable, linked with the plots; and the pinned allocation.

/** Fills a table; `columns` are `{name, value, cell, isNumber}`, rows are sorted by the chosen column's value. */
class SortableTable {
  constructor(table, columns, onChoose) {
    this.table = table;
    this.columns = columns;
    this.onChoose = onChoose;
    this.rows = [];
    this.sorted = columns.findIndex((column) => column.isFirst);
    this.isDescending = true;
    const heads = columns.map((column, number) =>
      element(
        "th",
        { scope: "col", class: column.isNumber ? "number" : "" },
        element("button", { type: "button", onclick: () => this.#sortBy(number) }, column.name),
      ),
    );
    table.tHead.replaceChildren(element("tr", {}, ...heads));
    this.heads = heads;
  }

  #sortBy(number) {
    this.isDescending = this.sorted === number ? !this.isDescending : Boolean(this.columns[number].isNumber);
    this.sorted = number;
    this.show(this.rows, this.isChosen);
  }

  show(rows, isChosen) {
    this.rows = rows;
    this.isChosen = isChosen;
    const { value } = this.columns[this.sorted];
    const order = this.isDescending ? -1 : 1;
    const compared = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    const sorted = [...rows].sort((a, b) => order * compared(value(a), value(b)));
    this.heads.forEach((head, number) => {
      if (number === this.sorted) head.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.table.tBodies[0].replaceChildren(...sorted.map((row) => this.#row(row, isChosen(row))));
  }

  #row(row, isChosen) {
    const cells = this.columns.map((column) =>
      element("td", { class: column.isNumber ? "number" : "text" }, column.cell(row)),
    );
    const choose = () => this.onChoose(row);
    const onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose();
    };
    const attributes = { tabindex: "0", "aria-selected": String(isChosen), onclick: choose, onkeydown };
    return element("tr", attributes, ...cells);
  }
}

/** A small canvas with a band's pattern and letter. */
function swatch(view, owner) {
  const { device, inks } = view;
  const canvas = element("canvas", { class: "swatch", role: "img", "aria-label": `mark ${device.ownerLetter(owner)}` });
  const ratio = window.devicePixelRatio || 1;
  canvas.width = 34 * ratio;
  canvas.height = 18 * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = inks.band(device.band(owner), device.head.bands);
  pen.fillRect(0, 0, 34, 18);
  label(pen, inks, device.ownerLetter(owner), 17, 9);
  return canvas;
}

function ownersTable(view) {
  const { device } = view;
  const { peak, owners } = device.head;
  const columns = [
    { name: "Mark", value: (row) => -row.number, cell: (row) => swatch(view, row.number) },
    { name: "Owner", value: (row) => row.name, cell: (row) => row.name },
    { name: "At the peak", isNumber: true, isFirst: true, value: (row) => row.peak_bytes, cell: (row) => bytes(row.peak_bytes) },
    { name: "Share", isNumber: true, value: (row) => row.peak_bytes, cell: (row) => percent(row.peak_bytes, peak.allocated_bytes) },
    { name: "Count", isNumber: true, value: (row) => row.peak_count, cell: (row) => integer(row.peak_count) },
    { name: "Its own most", isNumber: true, value: (row) => row.highest_bytes, cell: (row) => bytes(row.highest_bytes) },
  ];
  const table = new SortableTable(byId("owners"), columns, (row) => {
    view.set({ owner: view.owner === row.number ? -1 : row.number });
    showOwner(view, row.number);
  });
  byId("owners").caption.textContent = "Who holds memory at the peak. Choose a row to highlight it in the plots.";
  byId("owners-note").textContent = device.head.owners_untold
    ? `${counted(device.head.owners_untold, "smaller owner")} not listed.`
    : "";
  const rows = owners.map((owner, number) => ({ ...owner, number }));
  return () => table.show(rows, (row) => row.number === view.owner);
}

function aliveTable(view) {
  const { device } = view;
  const { lives } = device;
  const columns = [
    { name: "Mark", value: (i) => -lives.owner[i], cell: (i) => swatch(view, lives.owner[i]) },
    { name: "Owner", value: (i) => device.ownerName(lives.owner[i]), cell: (i) => device.ownerName(lives.owner[i]) },
    { name: "Size", isNumber: true, isFirst: true, value: (i) => lives.size[i], cell: (i) => bytes(lives.size[i]) },
    { name: "Since event", isNumber: true, value: (i) => lives.birth[i], cell: (i) => bornText(lives.birth[i]) },
    { name: "Until event", isNumber: true, value: (i) => lives.end[i], cell: (i) => endText(device, lives.end[i]) },
    { name: "Address", isNumber: true, value: (i) => lives.address[i], cell: (i) => hexadecimal(lives.address[i]) },
  ];
  const table = new SortableTable(byId("alive"), columns, (i) => pin(view, i));
  return () => {
    const alive = device.livesAt(view.moment).sort((a, b) => lives.size[b] - lives.size[a]);
    byId("alive").caption.textContent =
      `${view.momentText(view.moment)}: the largest ${integer(Math.min(alive.length, 100))} of ${integer(alive.length)} listed.`;
    table.show(alive.slice(0, 100), (i) => i === view.pinned);
  };
}

const bornText = (birth) => (birth === 0 ? "before recording" : integer(birth - 1));
const endText = (device, end) => (end >= device.head.moments ? "end of recording" : integer(end - 1));

/** Pins an allocation: outlined in the maps, told in the panel. */
function pin(view, position) {
  view.set({ pinned: position });
  const { device } = view;
  const { lives } = device;
  const [birth, released, end] = [lives.birth[position], lives.released[position], lives.end[position]];
  const events = end - Math.max(birth, 1);
  const facts = [
    ["Size", `${bytes(lives.size[position])} (${integer(lives.size[position])} bytes)`],
    ["Owner", `${device.ownerLetter(lives.owner[position])} ${device.ownerName(lives.owner[position])}`],
    ["Allocated", birth === 0 ? "before the recording" : view.momentText(birth)],
    ["Freed", end >= device.head.moments ? "not before the recording ended" : view.momentText(end)],
    ["Life", `${counted(events, "event")}${device.hasTimes ? `, ${duration(device.timeAt(Math.min(end, device.head.moments - 1)) - device.timeAt(birth))}` : ""}`],
    ["Address", hexadecimal(lives.address[position])],
  ];
  // A free that completes with its request waited for nobody.
  if (end - released > 1) facts.push(["Let go", `${view.momentText(released)}, then awaited another stream`]);
  const list = element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  byId("pinned-heading").textContent = "Allocation";
  byId("pinned-body").replaceChildren(list, stackList(device.stack(lives.stack[position])));
}

function showOwner(view, number) {
  const { device } = view;
  const owner = device.head.owners[number];
  if (!owner) return;
  const text =
    `${device.ownerLetter(number)} ${owner.name}: ${bytes(owner.peak_bytes)} in ${counted(owner.peak_count, "allocation")} ` +
    `at the peak, at most ${bytes(owner.highest_bytes)}. The stack of its largest:`;
  byId("pinned-heading").textContent = "Owner";
  byId("pinned-body").replaceChildren(
    element("p", {}, text),
    stackList(owner.stack === null ? null : device.stack(owner.stack)),
  );
}

/** A stack, innermost frame first: its Python frames, and all of them on demand; the user's own lines stand out. */
function stackList(stack) {
  if (!stack) return element("p", { class: "note" }, "Its stack is not in this file: it was left out to keep the file small.");
  if (!stack.frames.length) return element("p", { class: "note" }, "No stack was recorded for it.");
  const python = stack.frames.filter(({ file }) => isPython(file));
  const all = frameList(stack.frames, stack.cut, "Whole stack, innermost frame first");
  if (!python.length || python.length === stack.frames.length) return all;
  const summary = element("summary", {}, `All ${counted(stack.frames.length + stack.cut, "frame")}, with those of C++`);
  return element("div", {}, frameList(python, 0, "Python stack, innermost frame first"), element("details", {}, summary, all));
}

const isPython = (file) => file.endsWith(".py") || file.startsWith("<") || file.includes("ipykernel");

function frameList(frames, cut, name) {
  const items = frames.map(({ file, name: called, line }) => {
    const isOwn = isPython(file) && !/site-packages\/|\/torch\//.test(file);
    const place = element("span", { class: "file" }, ` ${file}${line ? `:${line}` : ""}`);
    return element("li", { class: isOwn ? "own" : "" }, called, place);
  });
  if (cut) items.push(element("li", { class: "file" }, `… ${counted(cut, "outer frame")} left out`));
  return element("ol", { class: "stack", tabindex: "0", "aria-label": name }, ...items);
}
