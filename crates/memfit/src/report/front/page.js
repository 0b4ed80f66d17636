// What the plans say when they are pointed at. Text only ever becomes text nodes; the plot is there without this.

const plots = [...document.querySelectorAll("svg.front")];
const rows = [...document.querySelectorAll("#plans tbody tr")];
const readout = document.getElementById("readout");
const marksOf = (plot) => [...plot.querySelectorAll(".point[data-point]")];
const line = (tag, text) => {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
};
let chosen = -1;

function choose(number) {
  const row = rows[number];
  if (!row || number === chosen) return;
  chosen = number;
  rows.forEach((other) => other.setAttribute("aria-selected", String(other === row)));
  const command = line("p", "");
  command.append(line("code", row.dataset.command));
  readout.replaceChildren(line("p", row.dataset.told), command);
  readout.dataset.point = String(number);
  for (const plot of plots) {
    for (const mark of marksOf(plot)) mark.classList.toggle("chosen", mark.dataset.point === String(number));
    const { x, y } = plot.querySelector(`[data-point="${number}"]`).dataset;
    const cross = plot.querySelector(".cross");
    cross.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) cross.querySelector(".cross-x").setAttribute(end, x);
    for (const end of ["y1", "y2"]) cross.querySelector(".cross-y").setAttribute(end, y);
  }
}

/** The plan whose mark is nearest to a place on the plot. */
function nearest(plot, event) {
  const box = plot.getBoundingClientRect();
  const scale = plot.viewBox.baseVal.width / box.width;
  const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  const distance = ({ dataset }) => Math.hypot(dataset.x - x, dataset.y - y);
  const marks = marksOf(plot);
  return Number(marks.reduce((best, mark) => (distance(mark) < distance(best) ? mark : best)).dataset.point);
}

for (const plot of plots) {
  // The read-out says it; a tooltip on top would only hide the plot.
  plot.querySelectorAll(".point title").forEach((title) => title.remove());
  const point = (event) => rows.length && choose(nearest(plot, event));
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const next = step && plot.querySelector(`.point[data-point="${chosen + step}"]`);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  for (const mark of marksOf(plot)) mark.addEventListener("focus", () => choose(Number(mark.dataset.point)));
}
rows.forEach((row, number) => {
  row.addEventListener("pointerenter", () => choose(number));
  row.addEventListener("click", () => choose(number));
});

/** The wide plot as a file of its own. */
function image() {
  const copy = plots[0].cloneNode(true);
  const { width, height } = plots[0].viewBox.baseVal;
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  copy.querySelector(".cross").remove();
  copy.querySelectorAll(".chosen").forEach((mark) => mark.classList.remove("chosen"));
  const style = document.createElementNS(copy.namespaceURI, "style");
  style.textContent = document.getElementById("plot-style").textContent;
  copy.prepend(style);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The plot at twice its size, as a PNG. */
function png() {
  const { text, width, height } = image();
  return new Promise((done, failed) => {
    const picture = new Image();
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * width, 2 * height];
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("the plot cannot be drawn"))), "image/png");
    };
    picture.onerror = () => failed(new Error("the plot cannot be drawn"));
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
}

document.getElementById("save-svg").onclick = () => save(new Blob([image().text], { type: "image/svg+xml" }), "front.svg");
document.getElementById("save-png").onclick = () => png().then((blob) => save(blob, "front.png"));
document.getElementById("controls").hidden = false;
readout.hidden = false;
// The exact plan with half the memory, or the next best.
const isHalf = ({ dataset }) => dataset.class === "exact" && Number(dataset.share) <= 50;
choose(Math.max(rows.findLastIndex(isHalf), 0));
document.documentElement.dataset.ready = "true";
// For tests and the curious.
window.memfit = { choose, png };
