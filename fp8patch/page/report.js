"use strict";
// Draws what report_data.py put into the page: curves of the runs, and maps of layers over time.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const tip = document.getElementById("tip");

function style(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

function showTip(event, lines) {
  tip.textContent = "";
  for (const line of lines) {
    const row = document.createElement("div");
    row.textContent = line;
    tip.append(row);
  }
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - box.height - 8) + "px";
}

function hideTip() {
  tip.style.display = "none";
}

// -- curves --------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function curve(svg) {
  const key = svg.dataset.key;
  const unit = svg.dataset.unit || "";
  const colours = style("--series").split(" ");
  const lines = data.runs
    .map((run, i) => ({ name: run.name, colour: colours[i % colours.length], points: run[key] }))
    .filter((line) => line.points.length);
  svg.textContent = "";
  if (!lines.length) {
    element("text", { x: 8, y: 24 }, svg, "not in these reports");
    return;
  }
  const width = svg.clientWidth, height = svg.clientHeight;
  const left = 56, right = 22, top = 8, bottom = 26;
  const values = lines.flatMap((line) => line.points.map((p) => p[1])).filter((v) => v !== null);
  const steps = lines.flatMap((line) => line.points.map((p) => p[0]));
  let low = Math.min(...values), high = Math.max(...values);
  if (svg.dataset.cap) {
    // Warm-up takes many times as long as a step: it would flatten all the others.
    const sorted = [...values].sort((a, b) => a - b);
    high = Math.min(high, 3 * sorted[Math.floor(sorted.length / 2)]);
    low = 0;
  }
  if (!(high > low)) [low, high] = [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const x = (s) => left + ((s - first) / (last - first)) * (width - left - right);
  const y = (v) => top + (1 - (Math.min(v, high) - low) / (high - low)) * (height - top - bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const value of ticks(low, high, 4)) {
    element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }, svg);
    const label = { x: left - 8, y: y(value) + 4, "text-anchor": "end" };
    element("text", label, svg, value.toLocaleString("en") + unit);
  }
  for (const step of ticks(first, last, Math.max(2, Math.floor(width / 130)))) {
    const label = { x: x(step), y: height - 8, "text-anchor": "middle" };
    element("text", label, svg, step.toLocaleString("en"));
  }
  for (const line of lines) {
    let path = "", pen = "M";
    for (const [step, value] of line.points) {
      if (value === null) { pen = "M"; continue; }
      path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
    element("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": 2, "stroke-linejoin": "round" }, svg);
  }
  const cross = element("line", { y1: top, y2: height - bottom, class: "grid", visibility: "hidden" }, svg);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + ((event.clientX - box.left - left) / (width - left - right)) * (last - first);
    const step = Math.round(Math.min(Math.max(at, first), last));
    for (const end of ["x1", "x2"]) cross.setAttribute(end, x(step));
    cross.setAttribute("visibility", "visible");
    const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
    const rows = lines.map((line) => {
      const [, value] = near(line.points);
      return `${line.name}: ${value === null ? "not finite" : Number(value.toPrecision(5)) + unit}`;
    });
    showTip(event, [`step ${step.toLocaleString("en")}`, ...rows]);
  };
  svg.onpointerleave = () => { hideTip(); cross.setAttribute("visibility", "hidden"); };
}

// -- maps ----------------------------------------------------------------------------------------

// A cell has 16 bits: 0 nothing was cast, 1 nothing was lost, from 2 on a part of 1e-8 to 1.
const FLOOR = -8, LEVELS = 65533;

function part(code) {
  return code < 2 ? 0 : 10 ** (FLOOR * (1 - (code - 2) / LEVELS));
}

function percent(value) {
  return value === 0 ? "none" : `${Number((100 * value).toPrecision(2))}%`;
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function palette() {
  const stops = style("--heat").split(" ").map(rgb);
  const bare = rgb(style("--panel"));
  return Array.from({ length: 256 }, (_, code) => {
    if (code === 0) return bare;
    if (code === 1) return stops[0];
    const at = ((code - 2) / 253) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return stops[i].map((c, k) => Math.round(c + (at - i) * (stops[i + 1][k] - c)));
  });
}

function decode(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

const decoded = new Map();
const state = { run: data.runs.findIndex((run) => run.heat), metric: "flushed" };

function cells(run, metric, role) {
  const key = `${run} ${metric} ${role}`;
  if (!decoded.has(key)) decoded.set(key, decode(data.runs[run].heat.cells[metric][role]));
  return decoded.get(key);
}

// What there is most to see of comes first.
function worstMetric() {
  const most = (metric) => Object.keys(data.runs[state.run].heat.cells[metric])
    .reduce((top, role) => cells(state.run, metric, role).reduce((a, b) => Math.max(a, b), top), 0);
  return Object.keys(data.said).reduce((a, b) => (most(b) > most(a) ? b : a));
}

function size(canvas, height) {
  const scale = devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(canvas.clientWidth * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

function drawMap(canvas, heat, rowHeight, colours) {
  const rows = heat.layers.length, columns = heat.steps.length;
  const codes = cells(state.run, state.metric, canvas.dataset.role);
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  const image = new ImageData(columns, rows);
  const shade = (code) => (code < 2 ? code : 2 + Math.round(((code - 2) / LEVELS) * 253));
  codes.forEach((code, i) => image.data.set([...colours[shade(code)], 255], 4 * i));
  small.getContext("2d").putImageData(image, 0, 0);
  const context = size(canvas, rows * rowHeight);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.clientWidth, rows * rowHeight);
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    const row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / rowHeight)));
    const code = codes[row * columns + column];
    const from = column ? heat.steps[column - 1] + 1 : 1;
    const to = heat.steps[column];
    const said = code === 0 ? "nothing cast" : `${percent(part(code))} ${data.said[state.metric]}`;
    showTip(event, [heat.layers[row], from === to ? `step ${to}` : `steps ${from} to ${to}`, said]);
  };
  canvas.onpointerleave = hideTip;
}

function drawNames(canvas, heat, rowHeight) {
  const context = size(canvas, heat.layers.length * rowHeight);
  context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  context.fillStyle = style("--soft");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.ceil(13 / rowHeight);
  heat.layers.forEach((name, i) => {
    if (i % every) return;
    let shown = name;
    while (shown.length > 4 && context.measureText("…" + shown).width > canvas.clientWidth - 4) shown = shown.slice(1);
    const text = shown === name ? name : "…" + shown;
    context.fillText(text, canvas.clientWidth - 2, Math.max((i + 0.5) * rowHeight, 7));
  });
}

function drawMaps() {
  const maps = document.querySelector(".maps");
  if (!maps || state.run < 0) return;
  const heat = data.runs[state.run].heat;
  const rowHeight = Math.max(4, Math.min(18, Math.floor(720 / heat.layers.length)));
  const colours = palette();
  drawNames(maps.querySelector(".names canvas"), heat, rowHeight);
  for (const canvas of maps.querySelectorAll("canvas[data-role]")) drawMap(canvas, heat, rowHeight, colours);
  for (const label of maps.querySelectorAll(".steps")) {
    const ends = [heat.steps[0], heat.steps[heat.steps.length - 1]];
    label.textContent = "";
    for (const end of ends.slice(0, heat.steps.length > 1 ? 2 : 1)) {
      const span = document.createElement("span");
      span.textContent = `step ${end.toLocaleString("en")}`;
      label.append(span);
    }
  }
  for (const button of document.querySelectorAll("button[data-metric]")) {
    button.setAttribute("aria-pressed", String(button.dataset.metric === state.metric));
  }
  const legend = document.querySelector(".legend canvas");
  const context = legend.getContext("2d");
  legend.width = 254;
  legend.height = 1;
  const image = new ImageData(254, 1);
  for (let i = 0; i < 254; i++) image.data.set([...colours[i + 2], 255], 4 * i);
  context.putImageData(image, 0, 0);
}

// -- the page ------------------------------------------------------------------------------------

function draw() {
  const colours = style("--series").split(" ");
  for (const swatch of document.querySelectorAll(".swatch")) {
    swatch.style.background = colours[Number(swatch.dataset.run) % colours.length];
  }
  document.querySelectorAll("svg.chart").forEach(curve);
  drawMaps();
}

function theme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  draw();
}

document.getElementById("theme").onclick = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
for (const button of document.querySelectorAll("button[data-metric]")) {
  button.onclick = () => { state.metric = button.dataset.metric; drawMaps(); };
}
const chosen = document.getElementById("run");
if (chosen) chosen.onchange = () => { state.run = Number(chosen.value); drawMaps(); };
if (state.run >= 0) state.metric = worstMetric();
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = () => theme(dark.matches ? "dark" : "light");
addEventListener("resize", draw);
theme(dark.matches ? "dark" : "light");
root.dataset.drawn = "true";
