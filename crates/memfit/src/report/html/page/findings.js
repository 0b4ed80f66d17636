// What the explanation found, from its JSON: refused requests, fragmentation, growth, other settings; and what this file
// left out.

function showFindings(view, explanation) {
  const { head } = view.device;
  const found = explanation?.devices?.find((device) => device.index === head.index);
  const sections = found
    ? [
        section("Refused requests", (found.oom ?? []).map((oom) => refusal(view, oom))),
        section(fragmentationTitle(found.fragmentation), fragmentation(found.fragmentation)),
        section("Growth from step to step", growth(found)),
        section("Other allocator settings, replayed", counterfactuals(found)),
      ]
    : [];
  const problems = (explanation?.problems ?? []).filter((one) => one.device === null || one.device === head.index);
  sections.push(
    section(
      "What the file contradicts itself in",
      problems.map((one) => element("li", {}, `${one.event === null ? "" : `event ${integer(one.event)}: `}${one.what}`)),
    ),
  );
  byId("findings").replaceChildren(...sections.filter(Boolean));
}

function section(title, items) {
  if (!items.length) return null;
  return element("section", {}, element("h2", {}, title), element("ul", {}, ...items));
}

function refusal(view, oom) {
  const moment = oom.event;
  const go = () => {
    view.showMoment(moment);
    view.set({ moment });
  };
  const button = element("button", { type: "button", onclick: go }, `event ${integer(oom.event)}`);
  const text = oom.summary ?? `${bytes(oom.requested_bytes)} refused: ${words(oom.cause)}`;
  return element("li", {}, button, ` ${text}`);
}

const fragmentationTitle = (found) =>
  found?.refusal_event === null ? "Fragmentation at the peak" : "Fragmentation when a request was refused";

function fragmentation(found) {
  if (!found) return [];
  const text = found.summary ?? `${bytes(found.inactive_bytes)} inactive: ${words(found.verdict)}`;
  const items = [element("li", {}, text)];
  for (const pinned of (found.pinned_segments ?? []).slice(0, 10)) {
    const by = (pinned.blocks ?? []).map((block) => `${bytes(block.bytes)} ${words(block.category)}`).join(", ");
    items.push(
      element("li", {}, `segment ${hexadecimal(pinned.address)}: ${bytes(pinned.inactive_bytes)} of ${bytes(pinned.bytes)} free, held by ${by}`),
    );
  }
  return items;
}

function growth(found) {
  const items = found.growth_summary ? [element("li", {}, found.growth_summary)] : [];
  for (const grown of (found.growth ?? []).slice(0, 20)) {
    const stack = element("ol", { class: "stack" }, ...grown.stack.split("\n").map((line) => element("li", {}, line)));
    const by = grown.bytes_per_step ? `${bytes(grown.bytes_per_step)} a step` : bytes(grown.bytes ?? 0);
    items.push(element("li", {}, `${by}, ${words(grown.category ?? "")}`, stack));
  }
  return items;
}

function counterfactuals(found) {
  return (found.counterfactuals ?? []).map((other) => {
    const avoided = other.oom_avoided === true ? ", no refused request" : other.oom_avoided === false ? ", still refused" : "";
    return element("li", {}, element("code", {}, other.settings), `: peak reserved ${bytes(other.peak_reserved_bytes)}${avoided}`);
  });
}

const words = (name) => String(name).replaceAll("_", " ");

/** What this file holds of the snapshot, so that nobody takes a summary for everything. */
function showDetail(view) {
  const { head, grids } = view.device;
  const lines = [
    `${counted(head.events, "event")} recorded; the timeline's columns are ${counted(grids[0].width, "event")} wide, each shown by its highest moment, so peaks are exact at every zoom.`,
  ];
  if (grids.length > 1) {
    const places = grids.slice(1).map((grid) => `${integer(grid.first)} to ${integer(grid.end)}`);
    lines.push(`Every single event is there from ${places.join(", from ")}.`);
  }
  lines.push(
    head.lives.listed === head.lives.total
      ? `All ${counted(head.lives.total, "allocation")} are listed with address and life.`
      : `${integer(head.lives.listed)} of ${counted(head.lives.total, "allocation")} are listed: those at the peak and the other chosen moments first, then the largest and longest.`,
  );
  if (head.segments.listed < head.segments.total) {
    lines.push(`${integer(head.segments.listed)} of ${counted(head.segments.total, "segment")} are listed.`);
  }
  if (head.stacks_untold) {
    lines.push(`${integer(head.stacks)} stacks have their text, ${integer(head.stacks_untold)} were left out.`);
  }
  byId("detail").replaceChildren(...lines.map((line) => element("li", {}, line)));
}
