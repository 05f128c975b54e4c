// ---- data: arrays over epochs, then queries --------------------------------------------------------------------

const about = data.about;
const queryCount = data.queries.values.length;
const epochCount = data.epochs.length;
const BLUE = "#0072B2", ORANGE = "#D55E00", GREEN = "#009E73", GRAY = "#777777";

const number = value => (value === about.missing ? null : value / about.scale);
const metric = (name, epoch, query) => number(data.metrics[name].values[epoch * queryCount + query]);
const reference = (epoch, query) => number(data.reference.values[epoch * queryCount + query]);
/** Keep probability of a negative, interpolated in the table that is given for the row of the positive. */
function keepProbability(similarity, positive) {
  if (!about.sampler) return 1;
  const { values, shape: [rows, columns] } = about.sampler;
  const row = Math.round(((positive + 1) / 2) * (rows - 1)), column = ((similarity + 1) / 2) * (columns - 1);
  const at = i => number(values[row * columns + Math.max(0, Math.min(columns - 1, i))]), left = Math.floor(column);
  return at(left) + (at(left + 1) - at(left)) * (column - left);
}
const label = place => (about.labeled ? data.labels.values[place] : null);
const className = place => (about.labeled ? data.classes[label(place)] : "");
const image = place => data.images.values[place];
const imageName = place => (data.names ? data.names[place] : `image ${image(place)}`);
/** What fits below a small image: names of files differ at their ends. */
function shortName(place) {
  if (!data.names) return String(image(place));
  const stem = data.names[place].split("/").pop().replace(/\.\w+$/, "");
  return stem.length > 6 ? `…${stem.slice(-5)}` : stem;
}
const percent = share => (share === null ? "–" : `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`);
const digits = (value, places = 2) => (value === null ? "–" : value.toFixed(places).replace(/^-(?=0\.?0*$)/, "").replace("-", "−"));
const epochName = epoch => `epoch ${data.epochs[epoch]}`;

/** The samples of a query at an epoch, from an array of image positions and one of similarities. */
function samples(ids, similarities, epoch, query) {
  const width = ids.shape[2], start = (epoch * queryCount + query) * width, found = [];
  for (let i = start; i < start + width; i++) {
    if (ids.values[i] >= 0) found.push({ at: i, place: ids.values[i], similarity: number(similarities.values[i]) });
  }
  return found;
}

function positivesOf(epoch, query) {
  return samples(data.positives, data.positive_similarity, epoch, query).map(sample => ({
    ...sample, weight: number(data.weights.values[sample.at]), verdict: verdict(query, sample.place, true),
  }));
}

function negativesOf(epoch, query) {
  return samples(data.negatives, data.negative_similarity, epoch, query).map(sample => ({
    ...sample, keep: number(data.negative_keep.values[sample.at]), verdict: verdict(query, sample.place, false),
  }));
}

/** True if a positive is of the query's class or a negative of another, else false; null without labels. */
function verdict(query, place, positive) {
  return about.labeled ? (label(place) === label(data.queries.values[query])) === positive : null;
}

/** Marker of a sample: circle for true, filled diamond for false, gray circle without labels. */
function marker(x, y, verdict, radius = 5) {
  if (verdict === false) {
    const r = radius + 1.5;
    return svg("path", { d: `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z`, fill: ORANGE, stroke: "#fff" });
  }
  return svg("circle", { cx: x, cy: y, r: radius, fill: "#fff", "fill-opacity": 0.7, stroke: verdict ? BLUE : GRAY, "stroke-width": 2 });
}

// ---- state -----------------------------------------------------------------------------------------------------

const SORTS = {
  positives: about.labeled ? "worst positives" : "least similar positives",
  ...(data.negatives.shape[2] ? { negatives: about.labeled ? "most false negatives" : `most negatives nearer than the ${about.competitor}` } : {}),
  image: data.names ? "file name" : "image number",
  ...(about.labeled ? { class: "class" } : {}),
};
const queryOf = new Map(Array.from(data.queries.values, (place, query) => [place, query]));
const state = { query: 0, epoch: epochCount - 1, sort: "positives", class: -1, walked: -1 };
let order = [];

function ordered() {
  const all = state.sort in data.worst
    ? Array.from(data.worst[state.sort].values.subarray(state.epoch * queryCount, (state.epoch + 1) * queryCount))
    : Array.from({ length: queryCount }, (_, query) => query);
  if (state.sort === "class") all.sort((a, b) => label(data.queries.values[a]) - label(data.queries.values[b]) || a - b);
  return state.class < 0 ? all : all.filter(query => label(data.queries.values[query]) === state.class);
}

function choose(change) {
  Object.assign(state, { walked: -1 }, change);
  state.epoch = Math.max(0, Math.min(epochCount - 1, state.epoch));
  order = ordered();
  if (!order.includes(state.query) && order.length) state.query = order[0];
  writeAddress();
  drawPicker();
  drawQuery();
}

function step(by) {
  const place = Math.max(0, Math.min(order.length - 1, order.indexOf(state.query) + by));
  if (order.length) choose({ query: order[place] });
}

/** Write the state into the address, so that a link shows the same query. */
function writeAddress() {
  const parts = [`query=${image(data.queries.values[state.query])}`, `epoch=${data.epochs[state.epoch]}`, `sort=${state.sort}`];
  if (state.class >= 0) parts.push(`class=${state.class}`);
  try { history.replaceState(null, "", `#${parts.join("&")}`); } catch { /* some viewers do not allow it */ }
}

/** The state that the address names. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1)), change = {};
  const query = Array.from(data.queries.values).findIndex(place => String(image(place)) === wanted.get("query"));
  const epoch = data.epochs.findIndex(value => String(value) === wanted.get("epoch"));
  if (epoch >= 0) change.epoch = epoch;
  if (Object.hasOwn(SORTS, wanted.get("sort") ?? "")) change.sort = wanted.get("sort");
  if (about.labeled && wanted.has("class") && data.classes[wanted.get("class")] !== undefined) change.class = Number(wanted.get("class"));
  if (query >= 0) change.query = query;
  else if (wanted.get("query") === null) {
    Object.assign(state, change);
    change.query = ordered()[0] ?? 0;
  }
  return change;
}

// ---- the picker: only visible cells are in the document --------------------------------------------------------

const CELL = { width: 60, height: 76 };
const grid = byId("grid"), space = byId("space");

const columns = () => Math.max(1, Math.floor(grid.clientWidth / CELL.width));

function caption(query) {
  const { epoch, sort } = state;
  if (sort === "image") return shortName(data.queries.values[query]);
  if (sort === "class") return className(data.queries.values[query]);
  if (sort === "negatives") return percent(metric(about.labeled ? "false_negatives_kept" : "nearer", epoch, query));
  const purity = metric("purity", epoch, query);
  if (about.labeled) return purity === null ? "none" : `${Math.round(purity * about.k)}/${about.k}`;
  return digits(metric("similarity", epoch, query));
}

function drawPicker() {
  const place = order.indexOf(state.query), row = Math.floor(place / columns());
  space.style.height = `${Math.ceil(order.length / columns()) * CELL.height}px`;
  if (place >= 0) {
    const top = row * CELL.height;
    if (top < grid.scrollTop) grid.scrollTop = top;
    if (top + CELL.height > grid.scrollTop + grid.clientHeight) grid.scrollTop = top + CELL.height - grid.clientHeight;
  }
  byId("sort").value = state.sort;
  byId("class").value = String(state.class);
  const captions = {
    positives: about.labeled ? `true of ${about.k} ${about.positives_short}` : "mean similarity",
    negatives: about.labeled ? "false negatives, as kept" : `negatives nearer than the ${about.competitor}`,
    image: SORTS.image, class: "class",
  };
  byId("shown").textContent = `${order.length.toLocaleString("en")} ${order.length === 1 ? "query" : "queries"}; below each: ${captions[state.sort]}`;
  drawCells();
}

function drawCells() {
  const across = columns();
  const first = Math.floor(grid.scrollTop / CELL.height) * across;
  const last = Math.min(order.length, (Math.ceil((grid.scrollTop + grid.clientHeight) / CELL.height) + 1) * across);
  const cells = [];
  for (let i = first; i < last; i++) {
    const query = order[i], place = data.queries.values[query];
    const cell = element("div", {
      class: "cell", role: "option", id: `query-${query}`, "aria-selected": String(query === state.query),
      "aria-label": `${imageName(place)} ${className(place)}`, title: imageName(place), "aria-posinset": i + 1, "aria-setsize": order.length,
    }, thumbnail(place, 48), caption(query));
    cell.style.left = `${(i % across) * CELL.width}px`;
    cell.style.top = `${Math.floor(i / across) * CELL.height}px`;
    cell.addEventListener("click", () => choose({ query }));
    cells.push(cell);
  }
  space.replaceChildren(...cells);
  grid.setAttribute("aria-activedescendant", `query-${state.query}`);
}

// ---- the query ---------------------------------------------------------------------------------------------------

function figure(sample, captions) {
  const { place, verdict } = sample;
  const made = element("figure", { class: verdict === null ? "" : String(verdict) },
    element("div", { class: "frame" }, thumbnail(place, 64)), ...captions);
  const itself = place === data.queries.values[state.query];
  const name = itself ? "itself" : className(place) || (data.names ? shortName(place) : imageName(place));
  made.append(element("span", { class: "verdict" }, verdict === null ? name : `${verdict ? "✓" : "✗"} ${name}`));
  made.title = `${imageName(place)}${about.labeled ? `, ${className(place)}` : ""}`;
  if (itself) made.title += ": the query's own image, as another's positive or an old bank row";
  else if (queryOf.has(place)) {
    made.classList.add("link");
    made.title += ": also a query, click to see it";
    made.addEventListener("click", () => choose({ query: queryOf.get(place), class: -1 }));
  }
  return made;
}

function bar(share) {
  const inner = element("i");
  inner.style.width = `${100 * Math.min(1, share)}%`;
  return element("span", { class: "bar" }, inner);
}

function drawQuery() {
  const { query, epoch } = state, place = data.queries.values[query], at = order.indexOf(query);
  byId("query-image").replaceChildren(thumbnail(place, window.innerWidth < 600 ? 80 : 112));
  byId("query-title").textContent = `${data.names ? imageName(place) : `Image ${image(place)}`}${about.labeled ? `: ${className(place)}` : ""}`;
  byId("query-summary").textContent = summary(query, epoch);
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at >= order.length - 1;
  byId("epoch").value = epoch;
  byId("epoch").setAttribute("aria-valuetext", epochName(epoch));
  byId("epoch-text").textContent = `${data.epochs[epoch]} of ${about.epochs}`;
  drawPositives();
  drawNegatives();
  drawTrends();
}

function summary(query, epoch) {
  const parts = [];
  const purity = metric("purity", epoch, query), weighted = metric("purity_weighted", epoch, query);
  if (purity !== null) {
    parts.push(`${Math.round(purity * about.k)} of ${about.k} ${about.positives_name} true${weighted === null ? "" : ` (${percent(weighted)} of their weight)`}`);
  } else if (metric("similarity", epoch, query) !== null) {
    parts.push(`${about.positives_name} at similarity ${digits(metric("similarity", epoch, query))} on average`);
  }
  const count = data.num_negatives.values[epoch * queryCount + query];
  const share = metric("false_negatives", epoch, query), kept = metric("false_negatives_kept", epoch, query);
  if (share !== null) {
    parts.push(`${percent(share)} of ${count.toLocaleString("en")} negatives false${about.sampler ? `, ${percent(kept)} of those kept` : ""}`);
  } else if (count) {
    parts.push(`${percent(metric("nearer", epoch, query))} of ${count.toLocaleString("en")} negatives nearer than the ${about.competitor}`);
  }
  return parts.join("; ") + (parts.length ? "." : "");
}

function drawPositives() {
  const { query } = state;
  const rows = data.epochs.map((_, epoch) => {
    const found = positivesOf(epoch, query);
    const figures = found.map(sample => figure(sample, about.mines
      ? [bar(sample.weight), `w ${digits(sample.weight)}`, element("br"), `s ${digits(sample.similarity)}`]
      : [`s ${digits(sample.similarity)}`]));
    const pick = element("button", { type: "button", tabindex: "-1" }, epochName(epoch));
    pick.addEventListener("click", () => choose({ epoch }));
    const row = element("div", { class: epoch === state.epoch ? "row now" : "row" }, pick,
      figures.length ? element("div", { class: "strip" }, ...figures) : element("span", { class: "soft" }, "none yet: the bank held too few rows"));
    return row;
  });
  const box = byId("positives");
  box.replaceChildren(...rows);
  const now = rows[state.epoch], top = now.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + now.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top;
}

const lowest = (() => {
  let least = 0;
  const ids = data.negatives.values, values = data.negative_similarity.values;
  for (let i = 0; i < ids.length; i++) if (ids[i] >= 0 && values[i] < least) least = values[i];
  return Math.floor((least / about.scale) * 10) / 10;
})();

const PLOT = { left: 42, right: 14, top: 32, bottom: 40, height: about.sampler ? 270 : 200 };

function drawNegatives() {
  if (!data.negatives.shape[2]) return;
  const { query, epoch } = state, box = byId("curve");
  const width = Math.max(280, box.clientWidth), inner = width - PLOT.left - PLOT.right;
  const tall = PLOT.height - PLOT.top - PLOT.bottom, floor = PLOT.height - PLOT.bottom;
  const x = similarity => PLOT.left + ((similarity - lowest) / (1 - lowest)) * inner;
  const y = probability => floor - probability * tall;
  const positive = reference(epoch, query), found = negativesOf(epoch, query);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${PLOT.height}`, role: "img",
    "aria-label": `keep probability of ${found.length} negatives along their similarity to the query` });
  plot.append(svg("defs", {}, svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 5, height: 5, fill: "#fff" }), svg("rect", { width: 2.5, height: 5, fill: ORANGE }))));
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    plot.append(svg("line", { x1: PLOT.left, x2: width - PLOT.right, y1: y(tick), y2: y(tick), stroke: "#e4e4e4" }),
      svg("text", { x: PLOT.left - 6, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  plot.append(...histogramBars(x, floor, tall * 0.45));
  const apart = inner < 420 ? 0.5 : 0.2;
  for (let tick = Math.ceil(lowest / apart) * apart; tick <= 1.001; tick += apart) {
    plot.append(svg("text", { x: x(tick), y: floor + 16, "text-anchor": "middle" }, digits(Math.abs(tick) < 0.01 ? 0 : tick, 1)));
  }
  plot.append(svg("text", { x: PLOT.left + inner / 2, y: floor + 33, "text-anchor": "middle" },
    `similarity s to the ${about.anchor}`));
  plot.append(svg("text", { x: PLOT.left, y: 10 }, "keep probability"));
  let path = "";
  for (let i = 0; i <= 100; i++) {
    const s = lowest + ((1 - lowest) * i) / 100;
    path += `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(keepProbability(s, positive)).toFixed(1)}`;
  }
  plot.append(svg("path", { d: path, fill: "none", stroke: "#333", "stroke-width": 2, ...(about.sampler ? {} : { "stroke-dasharray": "5 4" }) }));
  plot.append(svg("line", { x1: x(positive), x2: x(positive), y1: 16, y2: floor, stroke: GREEN, "stroke-width": 2, "stroke-dasharray": "6 3" }));
  const right = x(positive) > width - 120;
  plot.append(svg("text", { x: x(positive) + (right ? -5 : 5), y: 23, "text-anchor": right ? "end" : "start" },
    `${about.competitor} ${digits(positive)}`));
  const sorted = found.map((sample, i) => [sample, i]).sort((a, b) => (b[0].verdict ?? true) - (a[0].verdict ?? true));
  for (const [sample, i] of sorted) {
    const dot = marker(x(sample.similarity), y(sample.keep), sample.verdict);
    dot.id = `dot-${i}`;
    dot.append(svg("title", {}, sentence(sample, i, found.length)));
    plot.append(dot);
  }
  box.replaceChildren(plot);
  drawAxis(found, x, width);
  const figures = found.map((sample, i) => {
    const made = figure(sample, about.sampler
      ? [`p ${digits(sample.keep)}`, element("br"), `s ${digits(sample.similarity)}`]
      : [`s ${digits(sample.similarity)}`]);
    made.id = `negative-${i}`;
    made.addEventListener("pointerenter", () => walk(i, false));
    return made;
  });
  byId("strip").replaceChildren(...figures);
  byId("negative-text").textContent = found.length ? "Point at an image, or press j and k, to see where it lies on the curve." : "It had no negatives yet.";
}

/** Histogram of all negatives, those of the query's class hatched. */
function histogramBars(x, floor, tall) {
  const bars = [], at = (state.epoch * queryCount + state.query) * about.bins;
  for (let bin = 0; bin < about.bins; bin++) {
    const from = Math.max(lowest, -1 + (2 * bin) / about.bins), to = -1 + (2 * (bin + 1)) / about.bins;
    if (to <= lowest) continue;
    for (const [array, fill] of [[data.histogram, "#d9d9d9"], [data.histogram_false, "url(#hatch)"]]) {
      const height = array ? (array.values[at + bin] / 255) * tall : 0;
      if (height) bars.push(svg("rect", { x: x(from) + 0.5, width: Math.max(1, x(to) - x(from) - 1), y: floor - height, height, fill }));
    }
  }
  return bars;
}

/** As many negatives as fit, each below its position on the axis, the hardest first. */
function drawAxis(found, x, width) {
  const size = 26, rows = [[], []], images = [];
  for (const sample of found) {
    const left = Math.max(0, Math.min(width - size, x(sample.similarity) - size / 2));
    const row = rows.findIndex(taken => taken.every(other => Math.abs(other - left) >= size + 3));
    if (row < 0) continue;
    rows[row].push(left);
    const made = thumbnail(sample.place, size);
    made.style.left = `${left}px`;
    made.style.top = `${row * (size + 5) + 2}px`;
    if (sample.verdict === false) made.classList.add("false");
    images.push(made);
  }
  byId("axis").replaceChildren(...images);
}

function sentence(sample, i, count) {
  const parts = [`negative ${i + 1} of the ${count} shown: ${imageName(sample.place)}`];
  if (sample.place === data.queries.values[state.query]) parts.push("the query itself, as another image's positive or an old bank row");
  else if (about.labeled) parts.push(className(sample.place));
  parts.push(`similarity ${digits(sample.similarity)}`);
  if (about.sampler) parts.push(`kept with probability ${digits(sample.keep)}`);
  if (sample.verdict !== null) parts.push(sample.verdict ? "✓ another class" : "✗ the query's own class");
  return parts.join(", ");
}

/** Select the current negative as the query, if it is one. */
function followNegative() {
  const place = negativesOf(state.epoch, state.query)[state.walked]?.place;
  if (queryOf.has(place)) choose({ query: queryOf.get(place), class: -1 });
}

function walk(to, scroll) {
  const found = negativesOf(state.epoch, state.query);
  if (!found.length) return;
  const at = Math.max(0, Math.min(found.length - 1, to));
  byId(`negative-${state.walked}`)?.classList.remove("walked");
  byId(`dot-${state.walked}`)?.removeAttribute("transform");
  state.walked = at;
  const made = byId(`negative-${at}`), dot = byId(`dot-${at}`);
  made.classList.add("walked");
  const { x, y, width, height } = dot.getBBox();
  dot.setAttribute("transform", `translate(${x + width / 2} ${y + height / 2}) scale(2) translate(${-x - width / 2} ${-y - height / 2})`);
  dot.parentNode.append(dot);
  byId("negative-text").textContent = sentence(found[at], at, found.length);
  if (scroll) made.scrollIntoView({ block: "nearest" });
}

// ---- over training -----------------------------------------------------------------------------------------------

const TRENDS = [
  { title: `How pure are the ${about.positives_name}?`, needs: "purity", whole: true, share: true,
    lines: [["purity", "true, of all queries", BLUE], ["purity_weighted", "counted by weight", GREEN], ["hit", "queries with at least one true", GRAY]] },
  { title: about.sampler ? "How many negatives are false, before and after sampling?" : "How many negatives are false?", needs: "false_negatives", share: true,
    lines: [["false_negatives", "false, of all negatives", BLUE], ...(about.sampler ? [["false_negatives_kept", "false, as kept", ORANGE]] : [])] },
  { title: `How similar are the ${about.positives_name}?`, needs: "similarity", whole: true, lines: [["similarity", "mean of all queries", BLUE]] },
  { title: "What share of the negatives is kept?", needs: "kept", only: about.sampler !== null, whole: true, share: true, lines: [["kept", "mean of all queries", BLUE]] },
  { title: `How many negatives are nearer than the ${about.competitor}?`, needs: "nearer", only: !about.labeled, share: true, lines: [["nearer", "mean of all queries", BLUE]] },
];
const STYLES = [["", "circle"], ["7 3", "square"], ["2 3", "triangle"], ["", "diamond"]];

function point(shape, x, y, color) {
  const r = 4;
  const paths = {
    square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
    triangle: `M${x} ${y - r - 1}L${x + r + 1} ${y + r}L${x - r - 1} ${y + r}Z`,
    diamond: `M${x} ${y - r - 2}L${x + r + 2} ${y}L${x} ${y + r + 2}L${x - r - 2} ${y}Z`,
  };
  return shape === "circle" ? svg("circle", { cx: x, cy: y, r, fill: color }) : svg("path", { d: paths[shape], fill: color });
}

function drawTrends() {
  const charts = TRENDS.filter(trend => trend.only !== false && data.means.some(mean => mean[trend.needs] !== null));
  byId("trends").replaceChildren(...charts.map(chart));
}

function chart(trend) {
  const lines = trend.lines
    .map(([name, label, color], i) => ({ label, color, style: STYLES[i], values: data.means.map(mean => mean[name]) }))
    .filter(line => line.values.some(value => value !== null));
  const own = data.epochs.map((_, epoch) => metric(trend.needs === "false_negatives" && about.sampler ? "false_negatives_kept" : trend.needs, epoch, state.query));
  lines.push({ label: `this query${trend.needs === "false_negatives" && about.sampler ? ", as kept" : ""}`, color: "#1a1a1a", style: STYLES[3], values: own, thin: true });
  const all = lines.flatMap(line => line.values).filter(value => value !== null);
  const top = trend.whole ? 1 : Math.max(0.05, Math.ceil(Math.max(...all) * 11) / 10), bottom = Math.min(0, Math.floor(Math.min(...all) * 2) / 2);
  const width = 420, height = 190, left = 44, right = 14, floor = height - 28;
  const first = data.epochs[0], last = data.epochs[epochCount - 1];
  const x = epoch => (epochCount === 1 ? (left + width - right) / 2 : left + ((data.epochs[epoch] - first) / (last - first)) * (width - left - right));
  const y = value => floor - ((value - bottom) / (top - bottom)) * (floor - 10);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": trend.title });
  const steps = bottom < 0 ? (top - bottom) * 2 : 4;
  for (let i = 0; i <= steps; i++) {
    const value = bottom + ((top - bottom) * i) / steps;
    plot.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "#e4e4e4" }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, trend.share ? percent(value) : digits(value)));
  }
  const every = Math.ceil(epochCount / 10);
  data.epochs.forEach((value, epoch) => {
    if (epoch % every && epoch !== epochCount - 1) return;
    plot.append(svg("text", { x: x(epoch), y: floor + 17, "text-anchor": "middle" }, String(value)));
  });
  plot.append(svg("line", { x1: x(state.epoch), x2: x(state.epoch), y1: 6, y2: floor, stroke: "#1a1a1a", "stroke-dasharray": "1 3" }));
  for (const { values, color, style: [dash, shape], thin } of lines) {
    const known = values.map((value, epoch) => [epoch, value]).filter(pair => pair[1] !== null);
    if (known.length > 1) {
      plot.append(svg("path", { d: known.map(([epoch, value], i) => `${i ? "L" : "M"}${x(epoch)} ${y(value)}`).join(""), fill: "none", stroke: color,
        "stroke-width": thin ? 1 : 2, ...(dash ? { "stroke-dasharray": dash } : {}) }));
    }
    if (epochCount <= 40) plot.append(...known.map(([epoch, value]) => point(shape, x(epoch), y(value), color)));
  }
  const legend = lines.map(({ label, color, style: [dash, shape], values }) => element("span", {},
    svg("svg", { width: 26, height: 14 }, svg("line", { x1: 0, x2: 26, y1: 7, y2: 7, stroke: color, "stroke-width": 2, ...(dash ? { "stroke-dasharray": dash } : {}) }), point(shape, 13, 7, color)),
    `${label}: ${(trend.share ? percent : digits)(values[state.epoch])}`));
  return element("div", {}, element("h3", {}, trend.title), plot, element("p", { class: "legend" }, ...legend));
}

// ---- texts that do not change ---------------------------------------------------------------------------------------------

function writeTexts() {
  document.title = `What was mined: ${about.method} on ${about.data}`;
  byId("title").textContent = document.title;
  byId("about").textContent = `${about.title}. Encoder ${about.encoder}, ${about.epochs} epoch${about.epochs === 1 ? "" : "s"}; run ${about.run}. `
    + (about.labeled ? "Labels were not used in training; here they show which samples are right." : "These images have no labels, so the page cannot show which samples are right.");
  byId("positives-title").textContent = about.positives_title;
  byId("positives-note").textContent = about.positives_text;
  if (about.labeled) byId("positives-note").textContent += " ✓ solid blue: of the query's class; ✗ double orange: of another class.";
  describeNegatives();
  if (epochCount === 1) {
    byId("few-epochs").hidden = false;
    byId("few-epochs").textContent = "This run kept one checkpoint, so there is one epoch to look at. Train with save.snapshots=5 to keep one every five epochs and see mining change.";
  }
  byId("training-title").textContent = epochCount === 1 ? "How did mining go over all queries?" : "How did mining change over training?";
  byId("training-note").textContent = `Means over all ${queryCount.toLocaleString("en")} queries of this page, and the query picked. Dotted: the epoch picked.`;
  byId("epoch").max = epochCount - 1;
  byId("epoch").disabled = epochCount === 1;
  byId("sort").append(...Object.entries(SORTS).map(([value, label]) => element("option", { value }, label)));
  byId("class-label").hidden = !about.labeled;
  byId("class").hidden = !about.labeled;
  byId("class").append(element("option", { value: "-1" }, "all"), ...data.classes.map((name, i) => element("option", { value: i }, name)));
}

function describeNegatives() {
  byId("negatives-title").textContent = about.negatives_title;
  byId("negatives-note").textContent = about.negatives_text;
  byId("negatives").hidden = !data.negatives.shape[2];
  if (!data.negatives.shape[2]) return;
  byId("negatives-note").textContent += ` Up to ${data.negatives.shape[2]} are shown, half of them the hardest, the others spread evenly over the rest.`;
  const icon = (...parts) => svg("svg", { width: 18, height: 16 }, ...parts);
  const entries = about.labeled
    ? [[icon(marker(9, 8, true)), "✓ true negative: of another class"], [icon(marker(9, 8, false)), "✗ false negative: of the query's class"]]
    : [[icon(marker(9, 8, null)), "a negative"]];
  entries.push([icon(svg("rect", { x: 1, y: 3, width: 16, height: 12, fill: "#d9d9d9" })), `all negatives by similarity${about.labeled ? " (hatched: false)" : ""}`]);
  byId("legend").replaceChildren(...entries.map(([drawn, label]) => element("span", {}, drawn, label)));
}

// ---- keys and clicks -----------------------------------------------------------------------------------------------

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const target = event.target, inGrid = target === grid;
  if (target.tagName === "SELECT" || (target.tagName === "INPUT" && /^(Arrow|Home|End|Page)/.test(event.key))) return;
  const page = Math.max(1, Math.floor(grid.clientHeight / CELL.height)) * columns();
  const actions = {
    ArrowRight: () => step(1), ArrowLeft: () => step(-1),
    "]": () => choose({ epoch: state.epoch + 1 }), "[": () => choose({ epoch: state.epoch - 1 }),
    j: () => walk(state.walked + 1, true), k: () => walk(state.walked - 1, true),
    w: () => { choose({ sort: "positives", class: -1 }); step(-order.length); },
    Escape: () => grid.focus(),
    ...(inGrid ? {
      ArrowDown: () => step(columns()), ArrowUp: () => step(-columns()), PageDown: () => step(page), PageUp: () => step(-page),
      Home: () => step(-order.length), End: () => step(order.length), Enter: () => byId("detail").focus(),
    } : target.tagName === "BUTTON" ? {} : { Enter: followNegative }),
  };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

writeTexts();
document.addEventListener("keydown", onKey);
byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("epoch").addEventListener("input", event => choose({ epoch: Number(event.target.value) }));
byId("sort").addEventListener("change", event => { choose({ sort: event.target.value }); step(-order.length); });
byId("class").addEventListener("change", event => { choose({ class: Number(event.target.value) }); step(-order.length); });
grid.addEventListener("scroll", drawCells);
window.addEventListener("hashchange", () => choose(readAddress()));
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) choose({}); // phones change the height while scrolling
  width = window.innerWidth;
});
choose(readAddress());
