// Building and updating elements. Data only ever enters as text nodes and attribute values.

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const given = (value) => value !== null && value !== undefined && value !== false;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (given(value)) element.setAttribute(name, value === true ? "" : value);
  element.append(...children.flat(Infinity).filter(given));
  return element;
}

// Makes the element's children equal to these. What stays is kept, and with it focus, scroll and selection.
export function update(id, ...children) {
  const region = document.getElementById(id);
  const focused = document.activeElement;
  reconcile(region, fill(document.createElement("div"), null, children));
  if (focused !== document.activeElement && region.contains(focused)) focused.focus({ preventScroll: true });
}

const keyOf = (node) => node.dataset?.key;
const alike = (a, b) => a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

function reconcile(parent, wanted) {
  const keys = new Set([...wanted.children].map(keyOf));
  const keyed = new Map();
  for (const child of [...parent.children]) {
    if (keyOf(child) && !keys.has(keyOf(child))) child.remove();
    else if (keyOf(child)) keyed.set(keyOf(child), child);
  }
  let at = parent.firstChild;
  for (const next of [...wanted.childNodes]) {
    const old = keyed.get(keyOf(next)) ?? at;
    if (!old || !alike(old, next)) {
      parent.insertBefore(next, at);
    } else {
      if (old === at) at = at.nextSibling;
      else parent.insertBefore(old, at);
      change(old, next);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function change(old, next) {
  if (old.isEqualNode(next)) return; // most of the page, and the browser tells quickly
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...next.attributes])
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  reconcile(old, next);
}
