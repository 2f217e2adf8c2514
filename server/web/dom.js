// Finds and makes elements of the page.

export const $ = (id) => document.getElementById(id);

export function element(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}
