// The chat: sends the conversation, shows the answer as it streams, and lets turns be stopped, edited, retried and deleted.

import { chat, compiling, metrics } from './api.js';
import { conversation } from './conversation.js';
import { $, element } from './dom.js';
import { markdown } from './markdown.js';
import { hasImages, shown, startImages, takeImages } from './images.js';
import { sampling, settings } from './settings.js';

const FIRST_LOOK_MS = 1500; // an answer that has not begun by then may be waiting for a compilation
const articles = new Map(); // by message
let running = null; // the AbortController of the answer that streams
let editing = null; // the message whose text is being edited
let removed = null; // the messages before the latest removal, for Undo
let isReady = false;
let currentModel = () => '';

/** Whether the server takes requests. */
export function setReady(ready) {
  isReady = ready;
  buttons();
}

export function startChat(chosenModel) {
  currentModel = chosenModel;
  const ask = (text, images = []) => {
    offerUndo(null);
    conversation.messages.push({ role: 'user', content: text, images });
    show(conversation.messages.at(-1));
    $('messages').scrollTop = $('messages').scrollHeight;
    answer();
  };
  const send = () => {
    const text = $('prompt').value;
    if ((!text.trim() && !hasImages()) || running || !isReady) return;
    $('prompt').value = '';
    fit($('prompt'));
    ask(text, takeImages());
  };
  startImages();
  $('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  for (const example of $('welcome').querySelectorAll('button')) {
    example.addEventListener('click', () => {
      $('prompt').focus();
      ask(example.textContent);
    });
  }
  $('prompt').addEventListener('input', () => fit($('prompt')));
  $('prompt').addEventListener('keydown', (event) => onEnter(event, send));
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && running && !$('settings').open) running.abort();
    if (event.key === '/' && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) && !$('chat').hidden) {
      event.preventDefault();
      $('prompt').focus();
    }
  });
  $('stop').addEventListener('click', () => running?.abort());
  $('new-chat').addEventListener('click', () => {
    running?.abort();
    replace([], 'Conversation deleted.');
    $('prompt').focus();
  });
  $('undo').addEventListener('click', () => {
    replace(removed);
    $('messages').focus();
  });
  $('export').addEventListener('click', () => {
    const link = document.createElement('a');
    const { model, messages } = body();
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ model, messages }, null, 2)], { type: 'application/json' }));
    link.download = 'conversation.json';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  $('copy-curl').addEventListener('click', () => copy(curl(body()), $('copy-curl')));
  $('messages').addEventListener('click', (event) => {
    if (event.target.matches('.copy-code')) copy(event.target.closest('.code').querySelector('code').textContent, event.target);
  });
  redraw();
}

const onEnter = (event, action) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  action();
};

const body = () => ({
  model: currentModel(),
  messages: [...(settings().system ? [{ role: 'system', content: settings().system }] : []), ...conversation.sent()],
  ...sampling(),
});

const MAX_ARGUMENT = 100_000; // systems limit the length of an argument; images are longer

function curl(json) {
  const text = JSON.stringify(json);
  const data = text.length > MAX_ARGUMENT ? `@- <<'JSON'\n${text}\nJSON` : `'${text.replaceAll("'", "'\\''")}'`;
  return (
    `curl ${new URL('v1/chat/completions', document.baseURI)} -H 'Content-Type: application/json' ` +
    `-H "Authorization: Bearer $JAXLLM_API_KEY" -d ${data}`
  );
}

// Changing turns

/** Puts other messages in place of the conversation's. With a notice of what was removed, Undo is offered. */
function replace(messages, notice = '') {
  const before = conversation.messages;
  const { scrollTop } = $('messages');
  conversation.messages = messages;
  offerUndo(notice ? before : null, notice);
  editing = null;
  redraw();
  $('messages').scrollTop = scrollTop;
}

function offerUndo(messages, notice = '') {
  removed = messages;
  $('removed-text').textContent = notice;
  $('undo').hidden = !messages;
}

const laterTurns = (count) => `${count} later turn${count === 1 ? '' : 's'}`;

/** Asks again for a message's turn, or for another question in its place. Removes the turns after it. */
function retry(message, question = null) {
  if (running || !isReady) return;
  const [start, end] = conversation.bounds(message);
  const count = conversation.numTurnsAfter(message);
  const kept = question === null ? conversation.messages.slice(0, end) : [...conversation.messages.slice(0, start), question];
  while (kept.at(-1).role === 'assistant') kept.pop();
  replace(kept, count ? `Removed ${laterTurns(count)}.` : '');
  $('messages').scrollTop = $('messages').scrollHeight;
  $('messages').focus(); // the button that had the focus is gone
  answer();
}

function deleteTurn(message) {
  const [start, end] = conversation.bounds(message);
  replace([...conversation.messages.slice(0, start), ...conversation.messages.slice(end)], 'Turn deleted.');
  $('undo').focus();
}

function edit(message) {
  const others = editing;
  [editing] = conversation.turn(message);
  if (others) fillTurn(others);
  fillTurn(editing);
  const field = articles.get(editing).querySelector('textarea');
  fit(field);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function stopEditing() {
  const message = editing;
  editing = null;
  fillTurn(message);
  const button = conversation.turn(message).map((each) => articles.get(each).querySelector('.edit')).find(Boolean);
  button.focus();
}

// Asking

async function answer() {
  const message = { role: 'assistant', content: '', reasoning: '', tool_calls: [] };
  const json = body();
  conversation.messages.push(message);
  const article = show(message);
  fillTurn(message);
  $('announced').textContent = '';
  const mine = (running = new AbortController());
  buttons();
  const start = performance.now();
  let firstToken = 0;
  let frame = 0;
  let usage = null;
  let finish = null;
  const draw = () => {
    frame = 0;
    fill(article, message);
  };
  const explainWait = async () => {
    let program;
    try {
      program = compiling(await metrics());
    } catch {
      return; // no metrics, no explanation
    }
    if (firstToken || running !== mine) return;
    if (program) $('announced').textContent = program.text;
    fill(article, message, program ? `${program.text} …` : '');
    wait = setTimeout(explainWait, 1000);
  };
  let wait = setTimeout(explainWait, FIRST_LOOK_MS);
  try {
    for await (const chunk of chat(json, mine.signal)) {
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason || finish;
      if (add(message, choice.delta || {}) && !firstToken) firstToken = performance.now();
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === 'AbortError') finish = 'stopped';
    else {
      message.fault = error.message;
      message.code = error.code;
      finish = null;
    }
  }
  clearTimeout(wait);
  cancelAnimationFrame(frame);
  const seconds = (performance.now() - (firstToken || start)) / 1000;
  const notes = [];
  const delay = firstToken - start;
  if (firstToken) notes.push(`first token ${delay < 1000 ? `${delay.toFixed(0)} ms` : `${(delay / 1000).toFixed(2)} s`}`);
  if (usage && usage.completion_tokens > 1 && seconds > 0) notes.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (usage) notes.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`);
  if (finish && finish !== 'stop') notes.push({ length: 'cut off at the token limit', tool_calls: 'tool call' }[finish] || finish);
  message.notes = notes;
  running = null;
  $('announced').textContent = message.fault ? `The request failed: ${message.fault}` : 'The answer is complete.';
  if (conversation.messages.includes(message)) fillTurn(message); // else it was deleted meanwhile
  conversation.save();
  buttons();
}

/** Adds a delta to the message. Returns whether it had any content. */
function add(message, delta) {
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) message.reasoning += reasoning;
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls || []) {
    const known = (message.tool_calls[call.index ?? 0] ||= { id: '', type: 'function', function: { name: '', arguments: '' } });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.function.name += call.function.name;
    if (call.function?.arguments) known.function.arguments += call.function.arguments;
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

// Showing

function show(message) {
  const article = document.createElement('article');
  articles.set(message, article);
  $('messages').append(article);
  fill(article, message);
  return article;
}

function fillTurn(message) {
  for (const each of conversation.turn(message)) fill(articles.get(each), each);
  buttons();
}

function fill(article, message, waiting = '') {
  const isStreaming = message.role === 'assistant' && !message.notes;
  const log = $('messages');
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const wasOpen = [...article.querySelectorAll('details')].map((node) => node.open);
  const parts = [element('h2', { className: 'unseen', textContent: { user: 'You', assistant: 'Answer', tool: 'Tool' }[message.role] })];
  if (message.role === 'tool') parts.push(fold(`Tool result: ${message.name}`, message.content));
  else if (message === editing) parts.push(editor(message));
  else parts.push(...content(message, isStreaming, waiting));
  const foot = isStreaming || editing === message ? [] : footer(message);
  if (foot.length) parts.push(element('footer', {}, ...foot));
  article.className = `${message.role}${!isStreaming && conversation.hasFailed(message) ? ' left-out' : ''}`;
  article.replaceChildren(...parts);
  article.querySelectorAll('details').forEach((node, n) => (node.open = wasOpen[n] ?? false));
  if (follows) log.scrollTop = log.scrollHeight;
}

function content(message, isStreaming, waiting) {
  const parts = [];
  if (message.reasoning) parts.push(fold(isStreaming && !message.content ? 'Thinking…' : 'Reasoning', message.reasoning));
  if (message.images?.length) parts.push(shown(message.images));
  const text = element('div', { className: 'body' });
  text.append(message.role === 'user' ? message.content : markdown(message.content || (isStreaming && !message.reasoning ? waiting || '…' : '')));
  parts.push(text);
  for (const call of (message.tool_calls || []).filter(Boolean)) {
    parts.push(fold(`Tool call: ${call.function.name}`, call.function.arguments));
    if (!isStreaming && !message.fault && call.id && !isAnswered(call)) parts.push(resultForm(message, call));
  }
  if (message.fault) {
    const wayOut = message.code === 'context_length_exceeded' ? ' Shorten your message, or delete earlier turns to make room.' : '';
    parts.push(
      element('p', { className: 'fault', textContent: `The request failed: ${message.fault}` }),
      element('p', { className: 'quiet', textContent: `This turn is left out of later requests.${wayOut}` }),
    );
  }
  return parts;
}

/** What a message's footer has: a failed turn's buttons stand together where it failed. */
function footer(message) {
  const turn = conversation.turn(message);
  const isLast = message === turn.at(-1);
  const hasFailed = conversation.hasFailed(message);
  const parts = (message.notes || []).map((note) => element('span', { textContent: note }));
  const button = (name, label, action) => {
    const node = element('button', { type: 'button', className: name, textContent: label });
    node.addEventListener('click', () => action(node));
    return node;
  };
  if (message.role === 'assistant' && message.content) parts.push(button('copy', 'Copy', (node) => copy(message.content, node)));
  if (hasFailed ? message.fault : message.role === 'user') parts.push(button('edit', 'Edit', () => edit(message)));
  if (isLast) parts.push(button('retry', 'Retry', () => retry(message)));
  if (hasFailed ? message.fault : message.role === 'user') parts.push(button('delete', 'Delete', () => deleteTurn(message)));
  return parts;
}

function editor(message) {
  const count = conversation.numTurnsAfter(message);
  const field = element('textarea', { value: message.content, rows: 1, ariaLabel: 'Edit your message' });
  const cancel = element('button', { type: 'button', textContent: 'Cancel' });
  const buttonRow = element('div', { className: 'buttons' }, cancel, element('button', { className: 'main', textContent: 'Send' }));
  if (count) buttonRow.prepend(element('span', { className: 'quiet', textContent: `Sending removes ${laterTurns(count)}.` }));
  const form = element('form', { className: 'editor' }, field, buttonRow);
  field.addEventListener('input', () => fit(field));
  field.addEventListener('keydown', (event) => {
    onEnter(event, () => form.requestSubmit());
    if (event.key === 'Escape') stopEditing();
  });
  cancel.addEventListener('click', stopEditing);
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    const [{ images }] = conversation.turn(message);
    if ((!field.value.trim() && !images?.length) || running || !isReady) return;
    retry(message, { role: 'user', content: field.value, images });
  });
  return form;
}

function fold(title, text) {
  return element('details', {}, element('summary', { textContent: title }), element('div', { className: 'body', textContent: text }));
}

const isAnswered = (call) => conversation.messages.some((message) => message.tool_call_id === call.id);

/** Asks for a tool's result; once all calls of the message have one, the model goes on. */
function resultForm(message, call) {
  const field = element('input', { required: true, placeholder: 'Tool result', ariaLabel: `Result of ${call.function.name}` });
  const form = element('form', { className: 'result' }, field, element('button', { textContent: 'Send result' }));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    if (running || !isReady) return;
    const end = conversation.bounds(message)[1];
    conversation.messages.splice(end, 0, { role: 'tool', tool_call_id: call.id, name: call.function.name, content: field.value });
    if (message.tool_calls.filter(Boolean).every(isAnswered)) retry(message);
    else redraw();
  });
  return form;
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await writeToClipboard(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Copying is not allowed';
  }
  setTimeout(() => (button.textContent = label), 1200);
}

async function writeToClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // browsers have no clipboard API on pages without HTTPS, except from this machine
  const focused = document.activeElement;
  const field = element('textarea', { className: 'unseen', value: text });
  document.body.append(field);
  field.select();
  const isDone = document.execCommand('copy');
  field.remove();
  focused.focus();
  if (!isDone) throw new Error('not allowed');
}

function redraw() {
  articles.clear();
  $('messages').replaceChildren();
  conversation.messages.forEach(show);
  conversation.save();
  buttons();
}

function buttons() {
  const isEmpty = !conversation.messages.length;
  $('send').hidden = Boolean(running);
  $('send').disabled = !isReady;
  $('stop').hidden = !running;
  $('new-chat').disabled = $('export').disabled = $('copy-curl').disabled = isEmpty;
  $('undo').disabled = Boolean(running);
  $('welcome').hidden = !isEmpty;
  $('messages').hidden = isEmpty;
  for (const button of $('messages').querySelectorAll('.edit, .delete')) button.disabled = Boolean(running);
  for (const button of $('messages').querySelectorAll('.retry')) button.disabled = Boolean(running) || !isReady;
  for (const example of $('welcome').querySelectorAll('button')) example.disabled = !isReady;
}

/** Makes a text field as high as its text. */
function fit(field) {
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight + 2}px`;
}
