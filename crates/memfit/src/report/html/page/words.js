// Numbers as people read them, and elements made from text. Text from the snapshot only ever becomes text nodes.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** `1.50 GiB`, `800.0 MiB`, `17 B`: as the engine's `Bytes` shows them. */
function bytes(count) {
  for (const [unit, size] of UNITS) {
    if (count >= size) return `${(count / size).toFixed(size >= 2 ** 30 ? 2 : 1)} ${unit}`;
  }
  return `${count} B`;
}

const integers = new Intl.NumberFormat("en-US");
const integer = (value) => integers.format(Math.round(value));

function duration(microseconds) {
  if (microseconds >= 1e6) return `${(microseconds / 1e6).toFixed(3)} s`;
  if (microseconds >= 1e3) return `${(microseconds / 1e3).toFixed(2)} ms`;
  return `${Math.round(microseconds)} µs`;
}

const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "-");
const counted = (count, noun) => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
const hexadecimal = (address) => `0x${address.toString(16)}`;

/** An element with attributes and children; strings become text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
