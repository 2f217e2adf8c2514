// Images for the next message: chosen, pasted or dropped, and shown until they are sent. An image is {name, url}, with a data: URL.

import { $, element } from './dom.js';

const MAX_KEPT_BYTES = 1 << 20; // larger files are sent smaller: every request has the whole conversation
const MAX_EDGE = 2048;
const READ = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp']; // by servers; browsers read more, such as AVIF
let chosen = [];
let isTaken = false;

/** Whether the model sees images. */
export function setTaken(taken) {
  isTaken = taken;
  $('add-image').hidden = !taken;
  if (!taken) set([]);
}

export const hasImages = () => chosen.length > 0;

/** Returns the images, which are no longer shown. */
export function takeImages() {
  const taken = chosen;
  set([]);
  return taken;
}

/** Images as parts of a message. */
export const asParts = (images) => images.map(({ url }) => ({ type: 'image_url', image_url: { url } }));

/** Images in the conversation. */
export const shown = (images) =>
  element('div', { className: 'images' }, ...images.map(({ name, url }) => element('img', { src: url, alt: name })));

export function startImages() {
  const input = $('image-files');
  $('add-image').addEventListener('click', () => input.click());
  input.addEventListener('change', () => {
    add([...input.files]);
    input.value = ''; // so that the same file can be chosen again
    $('prompt').focus();
  });
  document.addEventListener('paste', (event) => {
    const files = isTaken && !$('chat').hidden && !$('settings').open ? [...event.clipboardData.files] : [];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  for (const name of ['dragover', 'dragleave', 'drop']) $('chat').addEventListener(name, onDrag);
}

function onDrag(event) {
  if (!isTaken || !event.dataTransfer.types.includes('Files')) return;
  event.preventDefault();
  $('chat').classList.toggle('takes-drop', event.type === 'dragover');
  if (event.type !== 'drop') return;
  add([...event.dataTransfer.files]);
  $('prompt').focus();
}

async function add(files) {
  const faults = [];
  for (const file of files) {
    try {
      const url = await read(file);
      set([...chosen, { name: file.name || 'Image', url }]);
    } catch {
      faults.push(`${file.name || 'This file'} is not an image that this browser can read.`);
    }
  }
  $('announced').textContent = $('image-fault').textContent = faults.join(' ');
  if (!faults.length) $('announced').textContent = `${chosen.length} image${chosen.length === 1 ? '' : 's'} to send.`;
}

/** The data: URL of an image; of a large one, with fewer pixels; as JPEG if servers do not read it. Throws for other files. */
async function read(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_EDGE / Math.max(bitmap.width, bitmap.height));
  if (file.size <= MAX_KEPT_BYTES && READ.includes(file.type)) return dataUrl(file);
  const canvas = element('canvas', { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext('2d');
  context.fillStyle = '#fff'; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function set(images) {
  chosen = images;
  $('image-fault').textContent = '';
  $('images').hidden = !images.length;
  $('images').replaceChildren(...images.map(thumbnail));
}

function thumbnail(image) {
  const remove = element('button', { type: 'button', textContent: 'Remove', ariaLabel: `Remove ${image.name}` });
  remove.addEventListener('click', () => {
    set(chosen.filter((each) => each !== image));
    $('announced').textContent = `${image.name} removed.`;
    ($('images').querySelector('button') ?? $('prompt')).focus();
  });
  return element('li', {}, element('img', { src: image.url, alt: image.name }), remove);
}
