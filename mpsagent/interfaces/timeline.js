"use strict";
// Zoom, hover and keys. Without this script the picture is whole, and the tables say the same.
const plot = document.getElementById("plot"), svg = plot.querySelector("svg.timeline");
const tip = document.getElementById("tip"), told = document.getElementById("told");
const first = +svg.dataset.from, last = +svg.dataset.to, offset = +svg.dataset.offset, side = +svg.dataset.side;
const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const things = [...svg.querySelectorAll("[data-a]")].sort((a, b) => a.dataset.a - b.dataset.a);
let from = first, to = last, chosen = -1, dragged = null;

for (const one of things) {  // else the browser shows them a second time
  const title = one.querySelector("title");
  one.setAttribute("aria-label", title.textContent);
  title.remove();
}

function draw(width = Math.max(280, plot.clientWidth)) {
  const high = svg.viewBox.baseVal.height;
  const x = at => side + (at - from) / (to - from) * (width - 2 * side);
  svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
  svg.setAttribute("width", width);
  for (const one of things) {
    const a = +one.dataset.a, b = +(one.dataset.b ?? a), seen = b >= from && a <= to;
    one.style.display = seen ? "" : "none";
    if (!seen) continue;
    if (one.dataset.b === undefined) {
      one.setAttribute("transform", `translate(${x(a)},${one.dataset.y})`);
    } else {
      const left = Math.max(x(a), 0), right = Math.min(x(b), width);
      one.setAttribute("x", left);
      one.setAttribute("width", Math.max(1, right - left));
    }
  }
  const step = steps.find(one => (to - from) / one <= width / 75) ?? 604800 * Math.ceil((to - from) / 604800 / (width / 75));
  let ticks = "";
  for (let at = (Math.floor((from + offset) / step) + 1) * step - offset; at < to; at += step) {
    const text = new Date((at + offset) * 1000).toISOString();
    const word = step >= 86400 || (at + offset) % 86400 === 0 ? text.slice(5, 10) : text.slice(11, step < 60 ? 19 : 16);
    ticks += `<g class="tick"><line x1="${x(at)}" x2="${x(at)}" y1="22" y2="${high}"/><text x="${x(at)}" y="16">${word}</text></g>`;
  }
  svg.querySelector(".axis").innerHTML = ticks;
}

function show(a, b) {  // at least a second, and never beyond what there is
  const span = Math.min(last - first, Math.max(1, b - a));
  from = Math.min(Math.max(a, first), last - span);
  to = from + span;
  hide();
  draw();
  const text = at => new Date((at + offset) * 1000).toISOString().slice(0, 19).replace("T", " ");
  told.textContent = `${text(from)} to ${text(to)}`;
}

function zoom(by, around = (from + to) / 2) {
  show(around - (around - from) * by, around + (to - around) * by);
}

function pan(part) {
  show(from + (to - from) * part, to + (to - from) * part);
}

function hide() {
  tip.hidden = true;
  svg.querySelector(".chosen")?.classList.remove("chosen");
}

function tell(one, x, y) {
  tip.textContent = one.getAttribute("aria-label");
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 16)}px`;
}

function choose(step) {
  if (!things.length) return;
  chosen = Math.min(Math.max(chosen + step, 0), things.length - 1);
  const one = things[chosen], a = +one.dataset.a, b = +(one.dataset.b ?? a);
  if (b < from || a > to) show((a + b) / 2 - (to - from) / 2, (a + b) / 2 + (to - from) / 2);
  hide();
  one.classList.add("chosen");
  const box = one.getBoundingClientRect();
  tell(one, Math.max(0, box.left), box.bottom);
  told.textContent = tip.textContent;
}

const keys = {
  "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": () => show(first, last), Home: () => show(first, last),
  ArrowLeft: () => pan(-.25), ArrowRight: () => pan(.25), n: () => choose(1), p: () => choose(-1), Escape: hide,
};
plot.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
for (const button of document.querySelectorAll("#tools button")) {
  button.addEventListener("click", () => keys[button.dataset.key]());
}
const at = event => from + (event.clientX - svg.getBoundingClientRect().left - side) / (svg.clientWidth - 2 * side) * (to - from);
plot.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;  // the wheel alone scrolls the page
  event.preventDefault();
  zoom(event.deltaY < 0 ? .7 : 1 / .7, at(event));
}, {passive: false});
plot.addEventListener("dblclick", event => zoom(.4, at(event)));
plot.addEventListener("pointerdown", event => { dragged = event.pointerType === "mouse" ? {x: event.clientX, from, to} : null; });
addEventListener("pointerup", () => { dragged = null; });
plot.addEventListener("pointermove", event => {
  if (dragged && Math.abs(event.clientX - dragged.x) > 3) {
    const moved = (event.clientX - dragged.x) / (svg.clientWidth - 2 * side) * (dragged.to - dragged.from);
    show(dragged.from - moved, dragged.to - moved);
    return;
  }
  const one = event.target.closest("[data-a]");
  one ? tell(one, event.clientX, event.clientY) : hide();
});
plot.addEventListener("pointerleave", hide);
addEventListener("resize", () => draw());
addEventListener("beforeprint", () => { show(first, last); draw(1000); });  // paper is wide, whatever the window is
addEventListener("afterprint", () => draw());
document.getElementById("tools").hidden = false;
draw();
