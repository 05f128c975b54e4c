// ---- the collection: arrays over the images of the page -----------------------------------------------------------

const about = data.about;
const count = data.paths.length;
const xs = Float32Array.from(data.x.values, value => value / about.positions);
const ys = Float32Array.from(data.y.values, value => value / about.positions);
const neighborCount = data.neighbors.shape[1];
const fixed = value => value / about.scale;
const digits = (value, places = 2) => value.toFixed(places).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
const percent = share => `${Math.round(100 * share)} %`;
const many = (value, one, several = `${one}s`) => `${value.toLocaleString("en")} ${value === 1 ? one : several}`;
const labelOf = place => (data.labels ? data.labels.values[place] : -1);
const labelName = place => (labelOf(place) >= 0 ? data.classes[labelOf(place)] : "");
const clusterOf = place => data.cluster.values[place];
const outlierOf = place => fixed(data.outlier.values[place]);
const groupOf = new Map(data.duplicates.flatMap((group, number) => group.map(place => [place, number])));
const voteOf = new Map(data.doubtful.map((place, i) => [place, data.votes[i]]));
const duplicateFirst = place => data.duplicates[groupOf.get(place)][0] === place;

function neighborsOf(place) {
  const found = [];
  for (let i = place * neighborCount; i < (place + 1) * neighborCount; i++) {
    if (data.neighbors.values[i] >= 0) found.push({ place: data.neighbors.values[i], similarity: fixed(data.similarity.values[i]) });
  }
  return found;
}

// ---- lists --------------------------------------------------------------------------------------------------------

const LISTS = {
  clusters: {
    title: `Clusters (${data.clusters.length})`,
    note: "Images that are alike, the largest cluster first; of each the images most like its center.",
    entries: data.clusters.map((cluster, number) => ({ title: clusterTitle(number), cluster: number, images: cluster.images })),
  },
  duplicates: {
    title: `Near-duplicates (${about.duplicate_groups})`,
    note: about.duplicate_groups
      ? `${many(about.duplicate_images, "image")} in ${many(about.duplicate_groups, "group")}: copies that were encoded anew, resized, cropped or mirrored, the surest group first. The first of a group is the largest file. m: match of the details.`
      : "No near-duplicates were found.",
    entries: data.duplicates.map((images, number) => ({ title: `Group ${number + 1}: ${many(images.length, "image")}`, images })),
  },
  outliers: {
    title: `Outliers (${about.outliers})`,
    note: "The images that are least like any other, the farthest first. d: 1 − mean similarity to the ten nearest images.",
    entries: [{ images: data.outliers }],
  },
  ...(about.labeled ? { labels: {
    title: `Doubtful labels (${about.doubtful})`,
    note: about.doubtful ? "Images whose nearest images mostly have another label: the label or the image may be wrong, or the encoder." : "No label disagrees with those of the nearest images.",
    entries: [{ images: data.doubtful }],
  } } : {}),
};
const LIST_NAMES = Object.keys(LISTS);
const PAGE = { clusters: 100, duplicates: 60, outliers: 1, labels: 1 }, CARDS = 120;

function clusterTitle(number) {
  const { size, labels } = data.clusters[number];
  const common = labels.map(([label, share]) => `${data.classes[label]} ${percent(share)}`).join(", ");
  return `Cluster ${number + 1}: ${many(size, "image")}${common ? ` (${common})` : ""}`;
}

const listImages = name => LISTS[name].entries.flatMap(entry => entry.images);

// ---- state --------------------------------------------------------------------------------------------------------

const COLORS = { ...(about.labeled ? { label: "label" } : {}), cluster: "cluster", outlier: "distance from others" };
const state = { image: -1, color: Object.keys(COLORS)[0], list: "clusters", only: null, thumbs: true, find: "" };
const view = { x: 0.5, y: 0.5, scale: 1 }; // the center in map coordinates, and pixels a unit
let shownEntries = 0, shownCards = CARDS, matches = null;

function choose(change, { show = true } = {}) {
  const before = { ...state };
  Object.assign(state, change);
  if (state.color !== before.color && !("only" in change)) state.only = null;
  if (state.image >= 0 && state.image !== before.image && show) bringIntoView(state.image);
  if (state.list !== before.list) { shownEntries = 0; shownCards = CARDS; }
  writeAddress();
  drawDetail();
  if (state.list !== before.list || !byId("tabs").children.length) drawList();
  else markCards();
  if (state.color !== before.color || state.only !== before.only || !byId("legend").children.length) drawLegend();
  byId("color").value = state.color;
  byId("thumbs").setAttribute("aria-pressed", String(state.thumbs));
  redraw();
}

function writeAddress() {
  const parts = [...(state.image >= 0 ? [`image=${state.image}`] : []), `color=${state.color}`, `list=${state.list}`];
  try { history.replaceState(null, "", `#${parts.join("&")}`); } catch { /* some viewers do not allow it */ }
}

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1)), change = {};
  const image = Number(wanted.get("image") ?? -1);
  if (Number.isInteger(image) && image >= 0 && image < count) change.image = image;
  if (Object.hasOwn(COLORS, wanted.get("color") ?? "")) change.color = wanted.get("color");
  if (Object.hasOwn(LISTS, wanted.get("list") ?? "")) change.list = wanted.get("list");
  return change;
}

// ---- colors -------------------------------------------------------------------------------------------------------

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const FEW = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d31", "#7b6fd0"];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function groupColor(group, groups) {
  if (groups <= FEW.length) return FEW[group];
  return `hsl(${Math.round((group * 137.508) % 360)} ${group % 2 ? 58 : 70}% ${dark.matches ? 62 : group % 3 ? 42 : 52}%)`;
}

/** Blue, near the others, to orange, far from them. */
const scaleColor = t => `hsl(${Math.round(205 - 180 * t)} 75% ${dark.matches ? 60 : 45}%)`;
const STEPS = 24;
const outlierRange = (() => {
  const sorted = Float32Array.from({ length: count }, (_, place) => outlierOf(place)).sort();
  return [sorted[0], Math.max(sorted[Math.floor(0.99 * (count - 1))], sorted[0] + 1e-6)];
})();

/** The group by which an image is colored; -1 for none. */
function colorGroup(place) {
  if (state.color === "label") return labelOf(place);
  if (state.color === "cluster") return clusterOf(place);
  const [low, high] = outlierRange;
  return Math.max(0, Math.min(STEPS - 1, Math.floor(((outlierOf(place) - low) / (high - low)) * STEPS)));
}

function colorOf(group) {
  if (group < 0) return dark.matches ? "#777" : "#999";
  if (state.color === "outlier") return scaleColor(group / (STEPS - 1));
  return groupColor(group, state.color === "label" ? data.classes.length : data.clusters.length);
}

const isLit = place => (state.only === null || colorGroup(place) === state.only) && (matches === null || matches.has(place));

function drawLegend() {
  const legend = byId("legend");
  if (state.color === "outlier") {
    const bar = element("span", { class: "scale" });
    bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(scaleColor).join(", ")})`;
    legend.replaceChildren(element("span", { class: "soft" }, "like the others "), bar, element("span", { class: "soft" }, " far from them"));
    return;
  }
  const sizes = new Map();
  for (let place = 0; place < count; place++) sizes.set(colorGroup(place), (sizes.get(colorGroup(place)) ?? 0) + 1);
  const groups = [...sizes.keys()].sort(state.color === "cluster" ? (a, b) => a - b : (a, b) => sizes.get(b) - sizes.get(a));
  legend.replaceChildren(...groups.map(group => {
    const dot = element("i");
    dot.style.background = colorOf(group);
    const name = group < 0 ? "no label" : state.color === "label" ? data.classes[group] : `cluster ${group + 1}`;
    const made = element("button", { type: "button", "aria-pressed": String(state.only === group) }, dot, name);
    made.addEventListener("click", () => choose({ only: state.only === group ? null : group }));
    return made;
  }));
}

// ---- the map ------------------------------------------------------------------------------------------------------

const canvas = byId("map"), pen = canvas.getContext("2d");
const size = { width: 1, height: 1, fit: 1 };
// Sheets as bitmaps: from an image element each thumbnail would be decoded and scaled anew where there is no GPU.
const bitmaps = sheets.map(() => null);
sheets.forEach((url, i) => {
  const made = new Image();
  made.addEventListener("load", async () => {
    bitmaps[i] = await createImageBitmap(made).catch(() => made);
    redraw();
  });
  made.src = url;
});
// Representative images first, then all others in an order that has nothing to do with their place.
const priority = (() => {
  const first = new Set([...data.clusters.flatMap(cluster => cluster.images.slice(0, 2))]);
  const others = Array.from({ length: count }, (_, place) => place).filter(place => !first.has(place));
  let seed = 1;
  for (let i = others.length - 1; i > 0; i--) {
    seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff;
    const j = seed % (i + 1);
    [others[i], others[j]] = [others[j], others[i]];
  }
  return [...first, ...others];
})();
const UNLIT = -2; // in place of a color group
let drawn = [], waiting = false, frames = 0, field = null;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawMap(); });
}

function measure() {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const whole = view.scale <= size.fit * 1.001;
  size.width = Math.max(1, box.width);
  size.height = Math.max(1, box.height);
  size.fit = 0.92 * Math.min(size.width, size.height);
  canvas.width = Math.round(size.width * ratio);
  canvas.height = Math.round(size.height * ratio);
  if (whole) fit();
  redraw();
}

function fit() {
  Object.assign(view, { x: 0.5, y: 0.5, scale: size.fit });
  redraw();
}

// A map is wider than high where the canvas is, and the other way round.
const stretchX = () => Math.max(1, Math.min(1.8, size.width / size.height));
const stretchY = () => Math.max(1, Math.min(1.8, size.height / size.width));
const screenX = place => (xs[place] - view.x) * view.scale * stretchX() + size.width / 2;
const screenY = place => (ys[place] - view.y) * view.scale * stretchY() + size.height / 2;

function zoom(factor, atX = size.width / 2, atY = size.height / 2) {
  const scale = Math.max(size.fit * 0.5, Math.min(size.fit * 400, view.scale * factor));
  const change = 1 / view.scale - 1 / scale;
  view.x += ((atX - size.width / 2) / stretchX()) * change;
  view.y += ((atY - size.height / 2) / stretchY()) * change;
  view.scale = scale;
  redraw();
}

function move(right, down) {
  view.x -= right / view.scale / stretchX();
  view.y -= down / view.scale / stretchY();
  redraw();
}

function bringIntoView(place) {
  const x = screenX(place), y = screenY(place), edge = 40;
  if (x < edge || x > size.width - edge) view.x = xs[place];
  if (y < edge || y > size.height - edge) view.y = ys[place];
}

const thumbSize = () => Math.round(Math.max(26, Math.min(96, 26 + 14 * Math.log2(Math.max(1, view.scale / size.fit)))));

function drawThumb(place, x, y, side) {
  const { side: tileSide, pitch, columns, rows } = data.sprites;
  const sheet = bitmaps[Math.floor(place / (columns * rows))], tile = place % (columns * rows);
  if (!sheet) return false;
  pen.imageSmoothingEnabled = side < 2 * tileSide;
  pen.drawImage(sheet, (tile % columns) * pitch, Math.floor(tile / columns) * pitch, tileSide, tileSide, x, y, side, side);
  return true;
}

function drawMap() {
  frames += 1;
  const ratio = canvas.width / size.width;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawPoints();
  drawn = [];
  if (state.thumbs) drawThumbs();
  if (state.image >= 0) drawPicked();
}

/** A color as a pixel of a Uint32Array over RGBA bytes. */
function packed(color) {
  pen.fillStyle = color; // reads back as #rrggbb
  const value = parseInt(pen.fillStyle.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** The ground and a square for each image, written pixel by pixel: ten thousand calls of fillRect take many times as long. */
function drawPoints() {
  if (field?.width !== canvas.width || field.height !== canvas.height) field = pen.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(field.data.buffer), { width, height } = field, ratio = width / size.width, colors = new Map();
  const side = Math.round(ratio * Math.max(2, Math.min(6, 2 + Math.log2(Math.max(1, view.scale / size.fit)))));
  const dot = (place, group) => {
    const left = Math.round(ratio * screenX(place) - side / 2), top = Math.round(ratio * screenY(place) - side / 2);
    if (left + side <= 0 || top + side <= 0 || left >= width || top >= height) return;
    if (!colors.has(group)) colors.set(group, packed(group === UNLIT ? css("--line") : colorOf(group)));
    const color = colors.get(group), from = Math.max(0, left), until = Math.min(width, left + side);
    for (let y = Math.max(0, top); y < Math.min(height, top + side); y++) pixels.fill(color, y * width + from, y * width + until);
  };
  pixels.fill(packed(css("--ground")));
  const some = state.only !== null || matches !== null;
  if (some) for (let place = 0; place < count; place++) if (!isLit(place)) dot(place, UNLIT);
  for (let place = 0; place < count; place++) if (!some || isLit(place)) dot(place, colorGroup(place));
  pen.putImageData(field, 0, 0);
}

/** Thumbnails where there is room for them: no two cover each other. */
function drawThumbs() {
  const side = thumbSize(), cell = side + 3, taken = new Map();
  const near = (column, row, x, y) => {
    for (let dx = -1; dx <= 1; dx++) {
      for (let dy = -1; dy <= 1; dy++) {
        const other = taken.get((column + dx) * 100003 + row + dy);
        if (other && Math.abs(other[0] - x) < cell && Math.abs(other[1] - y) < cell) return true;
      }
    }
    return false;
  };
  for (const place of priority) {
    const x = screenX(place), y = screenY(place);
    if (x < 0 || y < 0 || x > size.width || y > size.height || !isLit(place)) continue;
    const column = Math.floor(x / cell), row = Math.floor(y / cell);
    if (taken.has(column * 100003 + row) || near(column, row, x, y)) continue;
    taken.set(column * 100003 + row, [x, y]);
    pen.fillStyle = colorOf(colorGroup(place));
    pen.fillRect(x - side / 2 - 1.5, y - side / 2 - 1.5, side + 3, side + 3);
    if (drawThumb(place, x - side / 2, y - side / 2, side)) drawn.push({ place, x, y, half: side / 2 });
  }
}

function drawPicked() {
  const x = screenX(state.image), y = screenY(state.image), side = Math.max(48, thumbSize());
  pen.strokeStyle = css("--focus");
  pen.lineWidth = 1;
  pen.globalAlpha = 0.7;
  pen.beginPath();
  for (const { place } of neighborsOf(state.image)) {
    pen.moveTo(x, y);
    pen.lineTo(screenX(place), screenY(place));
  }
  pen.stroke();
  pen.globalAlpha = 1;
  pen.fillStyle = css("--focus");
  pen.fillRect(x - side / 2 - 3, y - side / 2 - 3, side + 6, side + 6);
  drawThumb(state.image, x - side / 2, y - side / 2, side);
  drawn.push({ place: state.image, x, y, half: side / 2 });
}

/** The image at a point of the canvas: a thumbnail there, or the nearest dot; -1 for none. */
function imageAt(x, y) {
  for (let i = drawn.length - 1; i >= 0; i--) {
    if (Math.abs(drawn[i].x - x) <= drawn[i].half && Math.abs(drawn[i].y - y) <= drawn[i].half) return drawn[i].place;
  }
  let best = -1, least = 14 ** 2;
  for (let place = 0; place < count; place++) {
    const distance = (screenX(place) - x) ** 2 + (screenY(place) - y) ** 2;
    if (distance < least && isLit(place)) [best, least] = [place, distance];
  }
  return best;
}

/** The nearest image in a direction, as the map shows it. */
function imageTowards(right, down) {
  const from = state.image;
  if (from < 0) return imageNearCenter();
  let best = from, least = Infinity;
  for (let place = 0; place < count; place++) {
    const x = screenX(place) - screenX(from), y = screenY(place) - screenY(from);
    const along = x * right + y * down, across = Math.abs(x * down) + Math.abs(y * right);
    if (place === from || along <= 0.5 || across > along || !isLit(place)) continue;
    const distance = x * x + y * y + across * across;
    if (distance < least) [best, least] = [place, distance];
  }
  return best;
}

function imageNearCenter() {
  let best = -1, least = Infinity;
  for (let place = 0; place < count; place++) {
    const distance = (screenX(place) - size.width / 2) ** 2 + (screenY(place) - size.height / 2) ** 2;
    if (distance < least && isLit(place)) [best, least] = [place, distance];
  }
  return best;
}

// ---- the image picked ---------------------------------------------------------------------------------------------

function card(place, side, ...lines) {
  const made = element("button", { type: "button", class: "card", title: data.paths[place], "data-image": place,
    "aria-current": String(place === state.image) }, thumbnail(place, side), ...lines);
  made.addEventListener("click", () => choose({ image: place }));
  return made;
}

const line = (text, kind = "") => element("span", kind ? { class: kind } : {}, text);

function drawDetail() {
  const place = state.image, picked = place >= 0;
  byId("neighbors-title").hidden = !picked;
  byId("picked-title").textContent = picked ? data.paths[place] : "Pick an image on the map or in a list.";
  byId("picked-image").replaceChildren(...(picked ? [thumbnail(place, 128)] : []));
  const facts = [];
  if (picked) {
    if (labelName(place)) facts.push(["label", labelName(place)]);
    const vote = voteOf.get(place);
    if (vote) facts.push(["neighbors say", `${data.classes[vote[0]]} (${percent(vote[1])})`]);
    facts.push(["cluster", `${clusterOf(place) + 1}`], ["distance", digits(outlierOf(place), 3)]);
    if (groupOf.has(place)) facts.push(["copies", `${data.duplicates[groupOf.get(place)].length - 1}, group ${groupOf.get(place) + 1}`]);
  }
  byId("picked-facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  byId("neighbors").replaceChildren(...(picked ? neighborsOf(place).map(({ place: other, similarity }) => {
    const differs = labelOf(place) >= 0 && labelOf(other) >= 0 && labelOf(other) !== labelOf(place);
    const name = labelName(other) ? [line(`${differs ? "✗ " : "✓ "}${labelName(other)}`, differs ? "other" : "")] : [];
    return card(other, 82, element("b", {}, `s ${digits(similarity, 3)}`), ...name);
  }) : []));
  byId("spoken").textContent = picked ? `${data.paths[place]}${labelName(place) ? `, ${labelName(place)}` : ""}` : "";
}

// ---- the lists ----------------------------------------------------------------------------------------------------

function listCard(place) {
  const lines = {
    clusters: () => [labelName(place) ? line(labelName(place)) : line(data.paths[place])],
    duplicates: () => [element("b", {}, `m ${digits(fixed(data.match.values[place]))}${duplicateFirst(place) ? " · keep" : ""}`), line(data.paths[place], "wrap")],
    outliers: () => [element("b", {}, `d ${digits(outlierOf(place), 3)}`), line(labelName(place) || data.paths[place])],
    labels: () => {
      const [suggested, share] = voteOf.get(place);
      return [line(labelName(place)), line(`neighbors: ${data.classes[suggested]} (${percent(share)})`, "other wrap")];
    },
  };
  return card(place, 82, ...lines[state.list]());
}

function drawList() {
  byId("tabs").replaceChildren(...LIST_NAMES.map((name, i) => {
    const made = element("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "list", "aria-selected": String(name === state.list),
      tabindex: name === state.list ? 0 : -1, title: `key ${i + 1}` }, LISTS[name].title);
    made.addEventListener("click", () => choose({ list: name }));
    return made;
  }));
  byId("list").setAttribute("aria-labelledby", `tab-${state.list}`);
  byId("list-note").textContent = LISTS[state.list].note;
  byId("entries").replaceChildren();
  addEntries();
}

function addEntries() {
  const { entries } = LISTS[state.list];
  if (entries.length === 1 && !entries[0].title) {
    const box = byId("entries").firstChild ?? byId("entries").appendChild(element("div", { class: "grid" }));
    box.append(...entries[0].images.slice(box.children.length, shownCards).map(listCard));
    byId("more").hidden = shownCards >= entries[0].images.length;
    return;
  }
  const until = Math.min(entries.length, shownEntries + PAGE[state.list]);
  for (const entry of entries.slice(shownEntries, until)) {
    const title = element("h3", {}, entry.title);
    if (entry.cluster !== undefined) {
      const show = element("button", { type: "button" }, "show on the map");
      show.addEventListener("click", () => choose({ color: "cluster", only: entry.cluster }));
      title.append(show);
    }
    byId("entries").append(element("div", { class: "group" }, title, element("div", { class: "strip" }, ...entry.images.map(listCard))));
  }
  shownEntries = until;
  byId("more").hidden = until >= entries.length;
}

function markCards() {
  for (const made of document.querySelectorAll("#entries .card")) made.setAttribute("aria-current", String(Number(made.dataset.image) === state.image));
}

function step(by) {
  const images = listImages(state.list);
  if (!images.length) return;
  const at = images.indexOf(state.image), to = at < 0 ? (by > 0 ? 0 : images.length - 1) : Math.max(0, Math.min(images.length - 1, at + by));
  choose({ image: images[to] });
  document.querySelector(`#entries [data-image="${images[to]}"]`)?.scrollIntoView({ block: "nearest" });
}

// ---- finding ------------------------------------------------------------------------------------------------------

function find(text) {
  state.find = text.toLowerCase();
  const hits = state.find ? data.paths.map((path, place) => [path, place]).filter(([path, place]) =>
    path.toLowerCase().includes(state.find) || labelName(place).toLowerCase().includes(state.find)).map(([, place]) => place) : null;
  matches = hits && new Set(hits);
  byId("found").textContent = hits ? many(hits.length, "image") : "";
  redraw();
}

function nextMatch() {
  const hits = [...(matches ?? [])];
  if (hits.length) choose({ image: hits.find(place => place > state.image) ?? hits[0] });
}

// ---- keys, pointers -----------------------------------------------------------------------------------------------

const DIRECTIONS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const { target, key } = event;
  if (key === "Escape") { canvas.focus(); event.preventDefault(); return; }
  if (target.id === "find") { if (key === "Enter") { nextMatch(); event.preventDefault(); } return; }
  if (target.tagName === "SELECT") return;
  if (target.getAttribute("role") === "tab" && (key === "ArrowLeft" || key === "ArrowRight")) {
    const next = LIST_NAMES[(LIST_NAMES.indexOf(state.list) + (key === "ArrowRight" ? 1 : LIST_NAMES.length - 1)) % LIST_NAMES.length];
    choose({ list: next });
    byId(`tab-${next}`).focus();
    event.preventDefault();
    return;
  }
  const actions = {
    n: () => step(1), p: () => step(-1), "/": () => byId("find").focus(),
    c: () => choose({ color: Object.keys(COLORS)[(Object.keys(COLORS).indexOf(state.color) + 1) % Object.keys(COLORS).length] }),
    t: () => choose({ thumbs: !state.thumbs }), "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: fit,
    ...Object.fromEntries(LIST_NAMES.map((name, i) => [String(i + 1), () => choose({ list: name })])),
    ...(target === canvas ? { Enter: () => byId("neighbors").querySelector("button")?.focus() } : {}),
  };
  if (target === canvas) {
    for (const [name, [right, down]] of Object.entries(DIRECTIONS)) {
      actions[name] = () => (event.shiftKey ? move(-60 * right, -60 * down) : choose({ image: imageTowards(right, down) }));
    }
  }
  if (!Object.hasOwn(actions, key)) return;
  event.preventDefault();
  actions[key]();
}

const pointers = new Map();
let travelled = 0;

function spread() {
  const [a, b] = [...pointers.values()];
  return { distance: Math.hypot(a.x - b.x, a.y - b.y), x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 };
}

const placeOn = event => {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};

canvas.addEventListener("pointerdown", event => {
  try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that a script made up */ }
  if (!pointers.size) travelled = 0;
  pointers.set(event.pointerId, placeOn(event));
  byId("tip").hidden = true;
});
canvas.addEventListener("pointermove", event => {
  const to = placeOn(event), from = pointers.get(event.pointerId);
  if (!from) { if (event.pointerType === "mouse") showTip(to); return; }
  if (pointers.size === 1) {
    travelled += Math.hypot(to.x - from.x, to.y - from.y);
    if (travelled > 4) { canvas.classList.add("moving"); move(to.x - from.x, to.y - from.y); }
    pointers.set(event.pointerId, to);
    return;
  }
  const before = spread();
  pointers.set(event.pointerId, to);
  const after = spread();
  travelled = 100;
  move(after.x - before.x, after.y - before.y);
  zoom(after.distance / Math.max(1, before.distance), after.x, after.y);
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, event => {
    const at = pointers.get(event.pointerId);
    pointers.delete(event.pointerId);
    canvas.classList.remove("moving");
    if (name === "pointerup" && at && travelled <= 4) {
      const place = imageAt(at.x, at.y);
      if (place >= 0) choose({ image: place }, { show: false });
    }
  });
}
canvas.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const { x, y } = placeOn(event);
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), x, y);
}, { passive: false });
canvas.addEventListener("dblclick", event => zoom(2, placeOn(event).x, placeOn(event).y));

function showTip(at) {
  const place = imageAt(at.x, at.y), tip = byId("tip");
  tip.hidden = place < 0;
  if (place < 0) return;
  tip.replaceChildren(thumbnail(place, 96), element("div", {}, labelName(place) || data.paths[place]));
  tip.style.left = `${Math.min(at.x + 14, size.width - 120)}px`;
  tip.style.top = `${Math.max(0, Math.min(at.y + 14, size.height - 140))}px`;
}

// ---- start --------------------------------------------------------------------------------------------------------

function writeTexts() {
  const name = about.data.split(/[\\/]/).filter(Boolean).pop() ?? about.data;
  document.title = `${name}: ${many(about.count, "image")}`;
  byId("title").textContent = document.title;
  const shown = about.shown < about.count ? ` The page shows ${about.shown.toLocaleString("en")} of them, the CSV files beside it have all.` : "";
  const unreadable = about.unreadable ? ` ${many(about.unreadable, "file")} could not be read.` : "";
  byId("about").textContent = `Images that the encoder finds alike are near each other (${about.layout} of the embeddings by ${about.encoder.encoder}, ${about.encoder.method}, epoch ${about.encoder.epoch}).${shown}${unreadable} s: cosine similarity.`;
  byId("color").append(...Object.entries(COLORS).map(([value, text]) => element("option", { value }, text)));
}

writeTexts();
document.addEventListener("keydown", onKey);
byId("color").addEventListener("change", event => choose({ color: event.target.value }));
byId("find").addEventListener("input", event => find(event.target.value));
byId("in").addEventListener("click", () => zoom(1.6));
byId("out").addEventListener("click", () => zoom(1 / 1.6));
byId("fit").addEventListener("click", fit);
byId("thumbs").addEventListener("click", () => choose({ thumbs: !state.thumbs }));
byId("more").addEventListener("click", () => { shownCards += CARDS; addEntries(); });
window.addEventListener("hashchange", () => choose(readAddress()));
window.addEventListener("resize", measure);
dark.addEventListener("change", () => { drawLegend(); redraw(); });
measure();
fit();
choose(readAddress());
