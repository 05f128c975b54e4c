"use strict";

// ---- the data of the page: arrays come as bytes in base64 --------------------------------------------------------

const KINDS = { int32: Int32Array, int16: Int16Array, uint16: Uint16Array, uint8: Uint8Array };

function bytes(base64) {
  const text = atob(base64);
  const array = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
  return array;
}

const data = JSON.parse(document.getElementById("data").textContent, (name, value) =>
  value && value.kind in KINDS ? { values: new KINDS[value.kind](bytes(value.bytes).buffer), shape: value.shape } : value);

// ---- small helpers for the document ----------------------------------------------------------------------------

const byId = id => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const sheets = data.sprites.sheets.map(url =>
  URL.createObjectURL(new Blob([bytes(url.slice(url.indexOf(",") + 1))], { type: "image/jpeg" })));

function thumbnail(place, size) {
  const { side, pitch, columns, rows } = data.sprites;
  const made = element("div", { class: size >= 2 * side ? "image pixels" : "image" });
  const tile = place % (columns * rows), step = (pitch * size) / side;
  const style = made.style;
  style.width = style.height = `${size}px`;
  style.backgroundImage = `url("${sheets[Math.floor(place / (columns * rows))]}")`;
  style.backgroundSize = `${columns * step}px ${rows * step}px`;
  style.backgroundPosition = `${-(tile % columns) * step}px ${-Math.floor(tile / columns) * step}px`;
  return made;
}
