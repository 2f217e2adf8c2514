// Puts the page together: model list, tabs, and the line that says that the server loads or requires a key.

import { ApiError, key, models } from './api.js';
import { setReady, startChat } from './chat.js';
import { $ } from './dom.js';
import { startLive } from './live.js';
import { setTaken } from './images.js';
import { setDefaults, startSettings } from './settings.js';

const notices = { server: {}, live: {} };

/** Shows a line above everything, with a bar if `percent` is given; an empty text removes it. The server's line comes before the live view's. */
function notify(source, text, { percent = null, asksForKey = false } = {}) {
  notices[source] = { text, percent, asksForKey };
  const shown = notices.server.text ? notices.server : notices.live;
  const [line, bar, button] = $('notice').children;
  if (line.textContent !== shown.text) line.textContent = shown.text ?? '';
  bar.hidden = shown.percent == null;
  if (!bar.hidden) bar.value = shown.percent;
  button.hidden = !shown.asksForKey;
  $('notice').hidden = !shown.text;
}

function nameModel() {
  $('model').hidden = $('model').options.length < 2;
  $('model-name').hidden = !$('model').hidden;
  $('model-name').textContent = $('model').title = $('model').value;
  document.title = `${$('model').value} – jaxllm`;
  setTaken($('model').selectedOptions[0]?.dataset.modalities.includes('image') ?? false);
}

function modelOption({ id, input_modalities: modalities }) {
  const option = new Option(id);
  option.dataset.modalities = modalities ?? '';
  return option;
}

let isAsking = 0;

async function findModels() {
  clearTimeout(isAsking);
  try {
    const found = await models();
    $('model').replaceChildren(...found.map(modelOption));
    setDefaults(found[0]?.chat_sampling ?? {});
    nameModel();
    notify('server', '');
    setReady(true);
  } catch (error) {
    setReady(false);
    if (error.status === 401) {
      notify('server', key.get() ? 'The server rejected this API key.' : 'This server requires an API key.', { asksForKey: true });
      return;
    }
    const isLoading = error.code === 'loading';
    const percent = /(\d+) %/.exec(error.message)?.[1];
    if (isLoading) notify('server', `${error.message[0].toUpperCase()}${error.message.slice(1)} …`, { percent });
    else notify('server', error instanceof ApiError ? `Not available: ${error.message}` : 'Cannot reach the server. Trying again …');
    isAsking = setTimeout(findModels, isLoading ? 500 : 1000 * (error.retryAfter || 2));
  }
}

const live = startLive((...notice) => notify('live', ...notice));
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
$('model').addEventListener('change', nameModel);
startChat(() => $('model').value);
findModels();
