// What the person chose: kept in this browser; the key only until the tab is closed.

import { key } from './api.js';

const STORE = 'jaxllm-settings';
const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'presence_penalty', 'frequency_penalty', 'max_tokens', 'seed'];
const $ = (id) => document.getElementById(id);
let current = {};
try {
  current = JSON.parse(localStorage.getItem(STORE)) || {};
} catch {
  // never saved, or not by us
}

export const settings = () => current;

/** The sampling values that were set, as fields of a request. */
export function sampling() {
  const found = {};
  for (const name of NUMBERS) if (current[name] !== undefined && current[name] !== '') found[name] = Number(current[name]);
  if (current.tools) found.tools = JSON.parse(current.tools);
  return found;
}

export function startSettings(onKey) {
  const dialog = $('settings');
  const form = dialog.querySelector('form');
  $('open-settings').addEventListener('click', () => {
    for (const field of form.elements) if (field.name) field.value = field.name === 'key' ? key.get() : (current[field.name] ?? '');
    dialog.showModal();
  });
  form.addEventListener('submit', (event) => {
    const fault = faultIn(form);
    $('settings-fault').textContent = fault;
    if (fault) event.preventDefault();
  });
  dialog.addEventListener('close', () => {
    if (faultIn(form)) return; // left with Esc: nothing is taken over
    const changed = key.get() !== form.elements.key.value;
    key.set(form.elements.key.value);
    current = {};
    for (const field of form.elements) if (field.name && field.name !== 'key' && field.value.trim()) current[field.name] = field.value;
    try {
      localStorage.setItem(STORE, JSON.stringify(current));
    } catch {
      // forbidden: they hold as long as the page
    }
    if (changed) onKey();
  });
  $('reset-settings').addEventListener('click', () => {
    for (const field of form.elements) if (field.name && field.name !== 'key') field.value = '';
    $('settings-fault').textContent = '';
  });
}

function faultIn(form) {
  if (!form.elements.tools.value.trim()) return '';
  try {
    const tools = JSON.parse(form.elements.tools.value);
    return Array.isArray(tools) && tools.length ? '' : 'Tools must be a JSON list with at least one tool.';
  } catch (error) {
    return `Tools are not JSON: ${error.message}`;
  }
}
