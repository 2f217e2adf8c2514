// Puts the page together: model list, tabs, and what is told while the server loads or asks for a key.

import { ApiError, models } from './api.js';
import { startChat } from './chat.js';
import { startLive } from './live.js';
import { startSettings } from './settings.js';

const $ = (id) => document.getElementById(id);
const tell = (text) => {
  $('notice').textContent = text;
  $('notice').hidden = !text;
};

async function findModels() {
  try {
    $('model').replaceChildren(...(await models()).map((name) => new Option(name)));
    document.title = `${$('model').value} – jaxllm`;
    tell('');
  } catch (error) {
    const waits = error instanceof ApiError && error.status === 503;
    if (error.status === 401) tell('This server asks for an API key: Settings has a field for it.');
    else tell(waits ? `${error.message} …` : `The server cannot be reached: ${error.message}`);
    if (error.status !== 401) setTimeout(findModels, 1000 * (error.retryAfter || 2));
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
    if (!['ArrowLeft', 'ArrowRight'].includes(event.key)) return;
    const other = tabs.find((each) => each !== name);
    select(other);
    $(`tab-${other}`).focus();
  });
}

startSettings(findModels);
startChat(() => $('model').value);
findModels();
