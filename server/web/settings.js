// The settings, kept in this browser; the API key only until the tab is closed.

import { key } from './api.js';
import { $ } from './dom.js';

const STORE = 'jaxllm-settings';
const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'top_n_sigma', 'presence_penalty', 'frequency_penalty', 'max_tokens', 'seed'];
let current = {};
let defaults = {};
try {
  current = JSON.parse(localStorage.getItem(STORE)) || {};
} catch {
  // never saved, or not by this page
}

export const settings = () => current;

/** Sends these sampling values where none is set, and shows them in the fields. */
export function setDefaults(values) {
  defaults = values;
  for (const [name, value] of Object.entries(values)) $('settings').querySelector(`[name="${name}"]`)?.setAttribute('placeholder', value);
}

/** The sampling values that were set, or else the server's for chats, as fields of a request. */
export function sampling() {
  const found = { ...defaults };
  for (const name of NUMBERS) if (current[name] !== undefined && current[name] !== '') found[name] = Number(current[name]);
  if (current.tools) found.tools = JSON.parse(current.tools);
  return found;
}

/** Returns a function that opens the dialog, with the focus in a field if one is named; `onKey` is called when the key has changed. */
export function startSettings(onKey) {
  const dialog = $('settings');
  const form = dialog.querySelector('form');
  const open = (name) => {
    for (const field of form.elements) if (field.name) field.value = field.name === 'key' ? key.get() : (current[field.name] ?? '');
    $('settings-fault').textContent = '';
    dialog.returnValue = '';
    dialog.showModal();
    if (name) form.elements[name].focus();
  };
  $('cancel-settings').addEventListener('click', () => dialog.close());
  form.addEventListener('submit', (event) => {
    const fault = faultIn(form);
    $('settings-fault').textContent = fault;
    if (fault) event.preventDefault();
  });
  dialog.addEventListener('close', () => {
    if (dialog.returnValue !== 'done') return;
    const changed = key.get() !== form.elements.key.value;
    key.set(form.elements.key.value);
    current = {};
    for (const field of form.elements) if (field.name && field.name !== 'key' && field.value.trim()) current[field.name] = field.value;
    try {
      localStorage.setItem(STORE, JSON.stringify(current));
    } catch {
      // forbidden: they last as long as the page
    }
    if (changed) onKey();
  });
  $('reset-settings').addEventListener('click', () => {
    for (const field of form.elements) if (field.name && field.name !== 'key') field.value = '';
    $('settings-fault').textContent = '';
  });
  return open;
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
