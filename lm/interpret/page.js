// The interactive parts of the page of lm.inspect. The data are those of data_json in page.py.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const n = data.ids.length;
const label = id => data.labels[id];
const token = t => label(data.ids[t]);
const quoted = t => `“${token(t)}” (${t})`;
const percent = p => `${(100 * p).toPrecision(3)} %`;

function create(parent, tag, text, properties) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return Object.assign(element, properties);
}

function mark(elements, chosen, name) {
  for (const element of elements) element.classList.toggle(name, element === chosen);
}

// Likely next tokens after the selected position.
function select(t) {
  const spans = find("text").querySelectorAll("span");
  mark(spans, spans[t], "selected");
  const columns = find("grid").querySelectorAll("thead td"), scrolled = find("grid").parentElement;
  mark(columns, columns[t], "selected");
  scrolled.scrollLeft = columns[t].offsetLeft - scrolled.clientWidth / 2;
  const bars = find("bars"), next = data.next, actual = t + 1 < n ? data.ids[t + 1] : null;
  bars.replaceChildren();
  const rows = next.ids[t].map((id, r) => [id, next.p[t][r]]);
  if (actual !== null && !next.ids[t].includes(actual)) rows.push([actual, next.actual[t]]);
  create(bars, "b", "after");
  create(bars, "div", quoted(t));
  for (const [id, p] of rows) {
    const name = id === actual ? "actual" : "";
    create(bars, "b", label(id), {className: name, title: label(id)});
    const row = create(bars, "div", undefined, {className: name});
    create(row, "i").style.width = `${75 * p / Math.max(...next.p[t])}%`;
    create(row, "span", percent(p));
  }
}

// Logit lens: a row for each layer, a column for each token.
function drawLens() {
  const grid = find("grid"), header = create(create(grid, "thead"), "tr");
  create(header, "th", "token");
  for (let t = 0; t < n; t++) create(header, "td", token(t), {onclick: () => select(t), title: `position ${t}`});
  const body = create(grid, "tbody");
  for (const layer of data.lens) {
    const row = create(body, "tr");
    create(row, "th", layer.name);
    for (let t = 0; t < n; t++) {
      const cell = create(row, "td", label(layer.ids[t][0]));
      cell.style.background = `rgb(0 114 178 / ${0.75 * layer.p[t][0]})`;
      if (t + 1 < n && layer.ids[t][0] === data.ids[t + 1]) cell.className = "hit";
      cell.onmouseenter = cell.onclick = () => showCell(layer, t);
    }
  }
}

function showCell(layer, t) {
  const guesses = layer.ids[t].map((id, r) => `“${label(id)}” ${percent(layer.p[t][r])}`).join(", ");
  const actual = t + 1 < n ? `; the token that follows, “${token(t + 1)}”, has ${percent(layer.actual[t])}` : "";
  find("cell").textContent = `${layer.name}, after ${quoted(t)}: ${guesses}${actual}`;
}

// Attention: a small map for each head, and the selected one in full size.
const bytesPerHead = n * (n + 1) / 2;
for (const layer of data.attention) {
  layer.bytes = Uint8Array.from(atob(layer.weights), character => character.charCodeAt(0));
}

function weight(layer, head, t, s) {
  return s > t ? 0 : layer.bytes[head * bytesPerHead + t * (t + 1) / 2 + s] / 255;
}

function draw(canvas, layer, head, size) {
  const largest = new Float32Array(size * size);
  for (let t = 0; t < n; t++) {
    for (let s = 0; s <= t; s++) {
      const i = Math.floor(t * size / n) * size + Math.floor(s * size / n);
      largest[i] = Math.max(largest[i], weight(layer, head, t, s));
    }
  }
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  largest.forEach((w, i) => {
    const shade = Math.sqrt(w), future = i % size > Math.floor(i / size);
    const colors = future ? [245, 245, 245] : [0, 60, 130].map(dark => Math.round(255 + (dark - 255) * shade));
    image.data.set([...colors, 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
}

// Tokens beside the rows and below the columns of the large map; not more than fit.
function labelAxes() {
  const every = Math.ceil(n / 40);
  for (const axis of ["rows", "columns"]) {
    for (let t = 0; t < n; t += every) create(find(axis), "span", token(t), {title: `position ${t}`});
  }
}

let shown = null;

function drawMaps() {
  for (const layer of data.attention) {
    create(find("maps"), "span", `layer ${layer.layer}`);
    const row = create(find("maps"), "div");
    for (let head = 0; head < layer.heads; head++) {
      const canvas = create(row, "canvas", undefined, {title: `layer ${layer.layer}, head ${head}`});
      draw(canvas, layer, head, Math.min(n, 64));
      canvas.onclick = () => showMap(layer, head, canvas);
    }
  }
}

function showMap(layer, head, canvas) {
  shown = {layer, head};
  mark(find("maps").querySelectorAll("canvas"), canvas, "selected");
  draw(find("map"), layer, head, n);
  showRow(n - 1);
}

function showRow(t, s) {
  if (!shown) return;  // no layer has attention
  const {layer, head} = shown, weights = data.ids.map((_, s) => weight(layer, head, t, s));
  const at = s === undefined ? weights.indexOf(Math.max(...weights)) : s;
  const what = s === undefined ? "reads most from" : "reads from";
  const name = `Layer ${layer.layer}, head ${head}: ${quoted(t)}`;
  find("weight").textContent = at > t ? `${name} does not see ${quoted(at)}, which comes later`
    : `${name} ${what} ${quoted(at)}, with weight ${weights[at].toFixed(2)}`;
  const sources = find("sources");
  sources.replaceChildren();
  weights.forEach((w, i) => {
    const text = token(i).replaceAll("␣", " ");
    const span = create(sources, "span", text, {title: `position ${i}: weight ${w.toFixed(2)}`});
    span.style.setProperty("--shade", Math.sqrt(w));
    if (i === t) span.className = "reads";
    if (text.includes("↵")) sources.append("\n");
  });
}

find("map").onmousemove = find("map").onclick = event => {
  const box = find("map").getBoundingClientRect();
  const at = (x, size) => Math.min(n - 1, Math.max(0, Math.floor(n * x / size)));
  showRow(at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width));
};

find("text").onclick = event => {
  if (event.target.dataset.t) select(Number(event.target.dataset.t));
};
drawLens();
drawMaps();
labelAxes();
select(n - 1);
find("grid").parentElement.scrollLeft = 0;
showCell(data.lens.at(-1), n - 1);
if (data.attention.length) showMap(data.attention[0], 0, find("maps").querySelector("canvas"));
