// Puts the page together: reads the sections, makes the views of a device, and listens.

async function start() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser lacks DecompressionStream; any from 2023 on has it");
  }
  const head = await inflateJson("head");
  const explanation = await inflateJson("explanation");
  if (!head?.devices?.length) throw new Error("the snapshot has no device with segments or events");
  byId("main").hidden = false;
  const loaded = new Map();
  const open = async (number) => {
    if (!loaded.has(number)) loaded.set(number, await Device.load(head.devices[number], number));
    const view = new View(loaded.get(number));
    show(view, explanation);
    return view;
  };
  // Not the first one but the one with the highest peak.
  const peaks = head.devices.map((device) => device.peak.allocated_bytes);
  const first = peaks.indexOf(Math.max(...peaks));
  if (head.devices.length > 1) chooseDevice(head, first, open);
  await open(first);
  document.documentElement.dataset.ready = "true";
}

function chooseDevice(head, first, open) {
  const options = head.devices.map((device, number) =>
    element("option", { value: String(number) }, `${device.index}: peak ${bytes(device.peak.allocated_bytes)}`),
  );
  byId("device").replaceChildren(...options);
  byId("device").value = String(first);
  byId("device").onchange = () => open(Number(byId("device").value));
  byId("device-choice").hidden = false;
}

/** Listeners of the device shown; another device takes them away first. */
let listening = new AbortController();

function show(view, explanation) {
  listening.abort();
  listening = new AbortController();
  const { signal } = listening;
  const on = (target, type, listener, options = {}) => target.addEventListener(type, listener, { signal, ...options });
  const plots = { overview: byId("overview"), plot: byId("plot"), memory: byId("memory"), segments: byId("segment-map") };
  const fillOwners = ownersTable(view);
  const fillAlive = aliveTable(view);
  let shownMoment = null;
  let shownOwner = null;
  let shownPinned = null;
  view.onChange(() => {
    drawOverview(view, plots.overview);
    drawTimeline(view, plots.plot);
    drawMemory(view, plots.memory);
    const isSame = view.moment === shownMoment && view.owner === shownOwner && view.pinned === shownPinned;
    if (!isSame || view.isStale) {
      const rows = drawSegments(view, plots.segments, byId("common-scale").checked);
      const { text, notes, reserved } = describeSegments(view, rows);
      byId("segments-summary").textContent = text;
      byId("segments-summary").dataset.reservedBytes = String(reserved);
      byId("segments-note").textContent = notes;
      if (byId("alive").closest("details").open) fillAlive();
      fillOwners();
    }
    [shownMoment, shownOwner, shownPinned] = [view.moment, view.owner, view.pinned];
    view.isStale = false;
    tellReadout(view);
    matchSlider(view);
  });
  listenToPlots(view, plots, on);
  listenToControls(view, on, fillAlive);
  on(window, "resize", () => view.set({ isStale: true }));
  on(window.matchMedia("(prefers-color-scheme: dark)"), "change", () => view.set({ inks: new Inks(), isStale: true }));
  showFindings(view, explanation);
  showDetail(view);
  byId("memory-note").dataset.text ??= byId("memory-note").textContent;
  byId("memory-note").textContent = byId("memory-note").dataset.text + leftOut(view.device.head.lives);
  // For tests and the curious: the view of the device shown.
  window.memfit = { view, segmentsAt };
  view.set({ isStale: true });
}

function leftOut({ listed, total }) {
  return listed === total ? "" : ` ${integer(listed)} of ${integer(total)} allocations are drawn; what the others held looks free.`;
}

/** What is under the cursor, in words. */
function tellReadout(view) {
  const { device } = view;
  const moment = view.cursor ?? view.moment;
  const column = device.query(moment, moment + 1);
  const { width } = column.grid;
  const start = column.grid.first + Math.floor((moment - column.grid.first) / width) * width;
  const where = width === 1
    ? view.momentText(moment)
    : `events ${integer(Math.max(start - 1, 0))} to ${integer(start + width - 1)}, highest ${view.momentText(column.moment)}`;
  const named = device.head.bands;
  const top = column.grid.bands
    .map((band, number) => [band[column.column], number])
    .sort((a, b) => b[0] - a[0])
    .filter(([held]) => held > 0)
    .slice(0, 3)
    .map(([held, number]) => `${number < named ? `${device.ownerLetter(number)} ${device.ownerName(number)}` : "others"} ${bytes(held)}`);
  const readout = byId("readout");
  readout.textContent =
    `${where}: ${bytes(column.allocated)} allocated` +
    `${column.active === column.allocated ? "" : `, ${bytes(column.active)} active`}, ${bytes(column.reserved)} reserved` +
    `${top.length ? `; ${top.join(", ")}` : ""}`;
  readout.dataset.allocatedBytes = String(column.allocated);
}

function listenToPlots(view, { overview, plot, memory, segments }, on) {
  for (const canvas of [plot, memory]) {
    const under = (event) => [event.offsetX, event.offsetY];
    let drag = null;
    on(canvas, "pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag = { x: event.offsetX, from: view.from, to: view.to, isSelection: event.shiftKey, hasMoved: false };
    });
    on(canvas, "pointermove", (event) => {
      const [x] = under(event);
      if (drag && Math.abs(x - drag.x) > 3) drag.hasMoved = true;
      if (drag?.hasMoved && !drag.isSelection) {
        const shift = ((drag.x - x) / (canvas.clientWidth - MARGIN.left - MARGIN.right)) * (drag.to - drag.from);
        view.show(drag.from + shift, drag.to + shift);
      }
      view.set({ cursor: view.momentAtX(x, canvas.clientWidth) });
    });
    on(canvas, "pointerleave", () => view.set({ cursor: null }));
    on(canvas, "pointercancel", () => (drag = null));
    on(canvas, "pointerup", (event) => {
      const [x, y] = under(event);
      if (drag?.hasMoved && drag.isSelection) {
        const ends = [drag.x, x].map((at) => view.valueAtX(at, canvas.clientWidth)).sort((a, b) => a - b);
        view.show(...ends);
      } else if (drag && !drag.hasMoved) {
        if (canvas === plot) chooseInTimeline(view, plot, x, y);
        else chooseInMemory(view, memory, x, y);
      }
      drag = null;
    });
    on(canvas, "dblclick", (event) => view.zoom(0.4, view.valueAtX(event.offsetX, canvas.clientWidth)));
    const wheel = (event) => {
      // A page that is being scrolled shall scroll on.
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const factor = 1.002 ** event.deltaY;
      if (event.shiftKey && canvas === memory) zoomPlaces(view, memory, event.offsetY, 1.002 ** (event.deltaY || event.deltaX));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move(event.deltaX / canvas.clientWidth);
      else view.zoom(factor, view.valueAtX(event.offsetX, canvas.clientWidth));
    };
    on(canvas, "wheel", wheel, { passive: false });
  }
  for (const canvas of [overview, plot, memory]) on(canvas, "keydown", (event) => pressed(view, event));
  on(segments, "click", (event) => {
    const position = blockUnder(view, event.offsetX, event.offsetY);
    if (position >= 0) pin(view, position);
  });
  listenToBrush(view, overview, on);
}

/** Dragging in the overview: inside the frame moves it, outside draws a new one. */
function listenToBrush(view, overview, on) {
  let drag = null;
  const value = (event) => {
    const part = (event.offsetX - MARGIN.left) / (overview.clientWidth - MARGIN.left - MARGIN.right);
    return Math.min(Math.max(part, 0), 1) * view.length;
  };
  on(overview, "pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    const at = value(event);
    const isInside = at > view.from && at < view.to && view.to - view.from < view.length;
    drag = { at, isInside, from: view.from, to: view.to };
  });
  on(overview, "pointermove", (event) => {
    if (!drag) return;
    const at = value(event);
    if (drag.isInside) view.show(drag.from + at - drag.at, drag.to + at - drag.at);
    else if (at !== drag.at) view.show(Math.min(at, drag.at), Math.max(at, drag.at));
  });
  on(overview, "pointerup", () => (drag = null));
  on(overview, "pointercancel", () => (drag = null));
}

/** Chooses the moment, the owner whose band is there, and that owner's largest allocation. */
function chooseInTimeline(view, plot, x, y) {
  const { device } = view;
  const { band, column } = bandAt(view, plot, x, y);
  view.set({ moment: column.moment, owner: band >= 0 && band < device.head.bands ? band : -1 });
  if (band < 0) return;
  const { lives } = device;
  const mine = device.livesAt(column.moment).filter((i) => device.band(lives.owner[i]) === band);
  if (!mine.length) return;
  pin(view, mine.reduce((best, i) => (lives.size[i] > lives.size[best] ? i : best)));
}

function chooseInMemory(view, memory, x, y) {
  const position = lifeUnder(view, memory, x, y);
  view.set({ moment: view.momentAtX(x, memory.clientWidth), owner: -1 });
  if (position >= 0) pin(view, position);
}

function pressed(view, event) {
  const { device } = view;
  const step = (by) => view.set({ moment: Math.min(Math.max(view.moment + by, 0), device.head.moments - 1) });
  const actions = {
    ArrowLeft: () => view.move(-0.2),
    ArrowRight: () => view.move(0.2),
    "+": () => view.zoom(0.5),
    "=": () => view.zoom(0.5),
    "-": () => view.zoom(2),
    Home: () => view.show(0, view.length),
    p: () => view.showMoment(device.head.peak.moment),
    P: () => view.showMoment(device.head.peak.moment),
    ",": () => step(-1),
    ".": () => step(1),
  };
  if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function listenToControls(view, on, fillAlive) {
  const { head } = view.device;
  on(byId("zoom-in"), "click", () => view.zoom(0.5));
  on(byId("zoom-out"), "click", () => view.zoom(2));
  on(byId("zoom-all"), "click", () => view.show(0, view.length));
  on(byId("zoom-peak"), "click", () => {
    view.showMoment(head.peak.moment);
    view.set({ moment: head.peak.moment });
  });
  byId("axis").value = "event";
  byId("axis").closest("label").hidden = !view.device.hasTimes;
  on(byId("axis"), "change", () => view.setAxis(byId("axis").value));
  byId("fit-height").checked = false;
  on(byId("fit-height"), "change", () => view.set({ fitHeight: byId("fit-height").checked }));
  on(byId("common-scale"), "change", () => view.set({ isStale: true }));
  on(byId("alive").closest("details"), "toggle", fillAlive);
  const slider = byId("moment-slider");
  slider.max = String(head.chosen.length - 1);
  on(slider, "input", () => view.set({ moment: head.chosen[Number(slider.value)].moment }));
  const reasons = { peak: "peak", out_of_memory: "OOM", end: "end", start: "start", step: "annotation", between: "" };
  const options = head.chosen.map(({ moment, reason, allocated_bytes: allocated }, number) => {
    const name = reasons[reason] ? `${reasons[reason]}, ` : "";
    return element("option", { value: String(number) }, `${name}${view.momentText(moment)}: ${bytes(allocated)}`);
  });
  const choice = byId("moment-choice");
  choice.replaceChildren(element("option", { value: "" }, "a moment of your own"), ...options);
  on(choice, "change", () => choice.value && view.set({ moment: head.chosen[Number(choice.value)].moment }));
}

/** The slider stands at the nearest chosen moment; the list says whether it is that one exactly. */
function matchSlider(view) {
  const { chosen } = view.device.head;
  let nearest = 0;
  chosen.forEach(({ moment }, number) => {
    if (Math.abs(moment - view.moment) < Math.abs(chosen[nearest].moment - view.moment)) nearest = number;
  });
  byId("moment-slider").value = String(nearest);
  byId("moment-slider").setAttribute("aria-valuetext", view.momentText(view.moment));
  byId("moment-choice").value = chosen[nearest].moment === view.moment ? String(nearest) : "";
}

start().catch((error) => {
  const fallback = byId("fallback");
  fallback.textContent = `The timeline cannot be shown: ${error.message}. The report as text:`;
  fallback.hidden = false;
  const text = document.querySelector("#main pre");
  if (text) fallback.after(text);
  document.documentElement.dataset.ready = "failed";
});
