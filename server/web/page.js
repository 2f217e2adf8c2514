// Puts the page together: model list, tabs, and what is told while the server loads or asks for a key.

import { ApiError, key, models } from './api.js';
import { setReady, startChat } from './chat.js';
import { startLive } from './live.js';
import { startSettings } from './settings.js';

const $ = (id) => document.getElementById(id);
/** Shows a line above everything, with a bar if it says how many percent are done; an empty text takes it away. */
function tell(text, asksForKey = false) {
  const percent = /(\d+) %/.exec(text);
  const [line, bar, button] = $('notice').children;
  if (line.textContent !== text) line.textContent = text;
  bar.hidden = !percent;
  if (percent) bar.value = Number(percent[1]);
  button.hidden = !asksForKey;
  $('notice').hidden = !text;
}

let isAsking = 0;

async function findModels() {
  clearTimeout(isAsking);
  try {
    $('model').replaceChildren(...(await models()).map((name) => new Option(name)));
    document.title = `${$('model').value} – jaxllm`;
    tell('');
    setReady(true);
  } catch (error) {
    setReady(false);
    if (error.status === 401) return tell(key.get() ? 'The server does not know this API key.' : 'This server asks for an API key.', true);
    const isLoading = error.code === 'loading';
    if (isLoading) tell(`${error.message[0].toUpperCase()}${error.message.slice(1)} …`);
    else tell(error instanceof ApiError ? `Not available: ${error.message}` : 'The server cannot be reached; trying again …');
    isAsking = setTimeout(findModels, isLoading ? 500 : 1000 * (error.retryAfter || 2));
  }
}

const live = startLive(tell);
const tabs = ['chat', 'live'];
function select(name) {
  for (const each of tabs) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute('aria-selected', each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  if (name === 'live') live.open();
  else live.close();
}
for (const name of tabs) {
  $(`tab-${name}`).addEventListener('click', () => select(name));
  $(`tab-${name}`).addEventListener('keydown', (event) => {
    if (!['ArrowLeft', 'ArrowRight', 'Home', 'End'].includes(event.key)) return;
    event.preventDefault();
    const other = event.key === 'Home' ? tabs[0] : event.key === 'End' ? tabs.at(-1) : tabs.find((each) => each !== name);
    select(other);
    $(`tab-${other}`).focus();
  });
}

const openSettings = startSettings(findModels);
$('open-settings').addEventListener('click', () => openSettings());
$('enter-key').addEventListener('click', () => openSettings('key'));
$('model').addEventListener('change', () => (document.title = `${$('model').value} – jaxllm`));
startChat(() => $('model').value);
findModels();
