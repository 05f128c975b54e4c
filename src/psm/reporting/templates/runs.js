"use strict";
// Polls runs.json, and draws the curves of the runs that are ticked.
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d31", "#7f7f7f"];
const DASHES = ["", "6 3", "2 3"];
const ticked = new Map(); // name -> shown or not, by hand
let runs = [], open = null;

const element = (name, attributes = {}, ...children) => {
  const space = ["svg", "path", "text", "line", "circle", "title"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const style = (name) => { const at = runs.map((run) => run.name).sort().indexOf(name); return { color: COLORS[at % COLORS.length], dash: DASHES[Math.floor(at / COLORS.length) % DASHES.length] }; };
const shown = (run, place) => ticked.has(run.name) ? ticked.get(run.name) : place < 6;
const short = (value) => Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));

function drawTable() {
  const body = document.querySelector("#runs tbody");
  const focus = document.activeElement && document.activeElement.id;
  body.replaceChildren(...runs.map((run, place) => {
    const box = element("input", { type: "checkbox", id: `show-${run.name}`, "aria-label": `show the curves of ${run.name}` });
    box.checked = shown(run, place);
    box.addEventListener("change", () => { ticked.set(run.name, box.checked); drawCurves(); });
    const button = element("button", { type: "button", id: `open-${run.name}` }, "images");
    button.addEventListener("click", () => openImages(run));
    const scores = Object.entries(run.scores).map(([name, value]) => `${name} ${value.toFixed(1)}`).join(" · ");
    const last = run.curves.knn ? `knn ~${run.curves.knn.at(-1)[1].toFixed(1)}` : "";
    return element("tr", {},
      element("td", {}, box, element("span", { class: "swatch", style: `background:${style(run.name).color}` })),
      element("td", { class: "name" }, run.name), element("td", { class: run.state, title: run.problem }, run.state),
      element("td", {}, run.method), element("td", {}, run.data), element("td", {}, run.encoder),
      element("td", { class: "number" }, `${run.epoch}/${run.epochs}`), element("td", {}, scores || last || run.problem),
      element("td", {}, run.age), element("td", {}, button));
  }));
  if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
}

function drawCurves() {
  const chosen = runs.filter(shown);
  const panels = CURVES.filter(([name]) => chosen.some((run) => run.curves[name]));
  document.getElementById("curves").replaceChildren(...panels.map(([name, title]) => panel(name, title, chosen.filter((run) => run.curves[name]))));
}

function panel(name, title, chosen) {
  const width = 420, height = 220, left = 46, bottom = 26, top = 8, right = 10;
  const points = chosen.flatMap((run) => run.curves[name]);
  const lastEpoch = Math.max(1, ...chosen.map((run) => run.epochs || 0), ...points.map(([epoch]) => epoch));
  let low = Math.min(...points.map(([, value]) => value)), high = Math.max(...points.map(([, value]) => value));
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const x = (epoch) => left + (width - left - right) * epoch / lastEpoch;
  const y = (value) => height - bottom - (height - bottom - top) * (value - low) / (high - low);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} over the epochs` });
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    svg.append(element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--line)" }), element("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    svg.append(element("text", { x: x(part * lastEpoch), y: height - 8, "text-anchor": part ? (part < 1 ? "middle" : "end") : "start" }, short(part * lastEpoch)));
  }
  for (const run of chosen) {
    const { color, dash } = style(run.name), curve = run.curves[name], [epoch, value] = curve.at(-1);
    svg.append(element("path", { d: curve.map(([e, v], place) => `${place ? "L" : "M"}${x(e).toFixed(1)} ${y(v).toFixed(1)}`).join(""), fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
    svg.append(element("circle", { cx: x(epoch), cy: y(value), r: 3.5, fill: color }, element("title", {}, `${run.name}, epoch ${epoch}: ${short(value)}`)));
  }
  return element("div", {}, element("h3", {}, title), svg);
}

function openImages(run) {
  open = { name: run.name, epoch: run.epoch };
  document.getElementById("images").hidden = false;
  document.getElementById("images-title").textContent = `${run.name}, epoch ${run.epoch}`;
  document.getElementById("images-page").src = `run?name=${encodeURIComponent(run.name)}`;
}

async function update() {
  const status = document.getElementById("status");
  try {
    runs = await (await fetch("runs.json")).json();
    const running = runs.filter((run) => run.state === "running").length;
    status.textContent = `${runs.length} run${runs.length === 1 ? "" : "s"}, ${running} running; updated ${new Date().toLocaleTimeString()}`;
    drawTable(); drawCurves();
    const now = open && runs.find((run) => run.name === open.name);
    if (now && now.epoch !== open.epoch) openImages(now);
  } catch {
    status.textContent = "psm runs serve has ended: start it again to go on.";
  }
  setTimeout(update, 2000);
}
update();
