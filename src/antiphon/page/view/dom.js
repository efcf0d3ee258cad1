// Elements of the page, made and filled. Text is always text: nothing here takes HTML. Shown by tests/page/test_pictures.py.

/** @param {string} id @returns {any} an element of whatever kind the document says */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no element ${id}`);
  return element;
}

/**
 * @param {string} tag @param {Record<string, string>} attributes @param {(Node | string)[]} children
 * @returns {any} an element of the kind of the tag
 */
export function make(tag, attributes = {}, children = []) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Write only what is different, so that nothing is laid out for nothing. @param {HTMLElement} element @param {string} text */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {HTMLElement} element @param {string} name @param {string} value */
export function mark(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** @param {Blob} blob @param {string} name of the file */
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  // The download has begun with the click; it keeps what it needs.
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
