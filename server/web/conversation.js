// The conversation: messages in turns, kept in this browser. Knows nothing of the page.

import { asParts } from './images.js';

const STORE = 'jaxllm-conversation';

export const conversation = {
  messages: load(),

  save() {
    for (const kept of [this.messages, this.messages.map((message) => ({ ...message, images: [] }))]) {
      try {
        localStorage.setItem(STORE, JSON.stringify(kept));
        return;
      } catch {
        // full or forbidden: images, or the whole conversation, then last as long as the page
      }
    }
  },

  /** The start and end of a message's turn: a question and all that follows until the next question. */
  bounds(message) {
    let start = this.messages.indexOf(message);
    let end = start + 1;
    while (start > 0 && this.messages[start].role !== 'user') start -= 1;
    while (end < this.messages.length && this.messages[end].role !== 'user') end += 1;
    return [start, end];
  },

  turn(message) {
    return this.messages.slice(...this.bounds(message));
  },

  hasFailed(message) {
    return this.turn(message).some(({ fault }) => fault);
  },

  numTurnsAfter(message) {
    return this.messages.slice(this.bounds(message)[1]).filter(({ role }) => role === 'user').length;
  },

  /** The messages as the API takes them. Turns that failed are left out: whatever made them fail would fail the next request too. */
  sent() {
    return this.messages
      .filter((message) => !this.hasFailed(message))
      .map(({ role, content, images, tool_calls, tool_call_id }) => ({
        role,
        content: images?.length ? [...asParts(images), ...(content ? [{ type: 'text', text: content }] : [])] : (content ?? ''),
        ...(tool_calls?.length ? { tool_calls } : {}),
        ...(tool_call_id ? { tool_call_id } : {}),
      }));
  },
};

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}
