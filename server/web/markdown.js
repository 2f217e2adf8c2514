// Turns the Markdown that models write into DOM nodes. Text stays text: nothing is ever parsed as HTML, no address is loaded by itself.

const element = (name, ...children) => {
  const node = document.createElement(name);
  node.append(...children);
  return node;
};

/** The nodes of a text. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.split('\n');
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if ((found = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line))) at = codeBlock(fragment, lines, at, found);
    else if (!line.trim()) at += 1;
    else if ((found = /^(#{1,6})\s+(.*)/.exec(line))) {
      fragment.append(element(`h${Math.min(5, found[1].length + 2)}`, ...inline(found[2])));
      at += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      fragment.append(element('hr'));
      at += 1;
    } else if (/^\s*>/.test(line)) {
      const inner = takeWhile(lines, at, (each) => /^\s*>/.test(each));
      fragment.append(element('blockquote', markdown(inner.map((each) => each.replace(/^\s*> ?/, '')).join('\n'))));
      at += inner.length;
    } else if (/^\s*([-*+]|\d{1,9}[.)])\s/.test(line)) at = list(fragment, lines, at);
    else if (line.includes('|') && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] || '')) at = table(fragment, lines, at);
    else {
      const paragraph = [];
      while (at < lines.length && lines[at].trim() && !(paragraph.length && startsBlock(lines[at]))) paragraph.push(lines[at++]);
      const node = element('p');
      paragraph.forEach((each, n) => node.append(...(n ? [element('br')] : []), ...inline(each)));
      fragment.append(node);
    }
  }
  return fragment;
}

const startsBlock = (line) => /^ {0,3}(`{3,}|~{3,})|^#{1,6}\s|^\s*>|^\s*([-*+]|\d{1,9}[.)])\s/.test(line);

const takeWhile = (lines, at, holds) => {
  let end = at;
  while (end < lines.length && holds(lines[end])) end += 1;
  return lines.slice(at, end);
};

function codeBlock(parent, lines, at, [, fence, language]) {
  const code = [];
  for (at += 1; at < lines.length && !lines[at].trimStart().startsWith(fence); at += 1) code.push(lines[at]);
  const copy = element('button', 'Copy');
  copy.type = 'button';
  copy.className = 'copy-code';
  const block = element('div', element('div', element('span', language), copy), element('pre', element('code', code.join('\n'))));
  block.className = 'code';
  parent.append(block);
  return at + 1;
}

function list(parent, lines, at, depth = 0) {
  const marker = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)/;
  const first = marker.exec(lines[at]);
  const node = element(first[3] ? 'ol' : 'ul');
  if (first[3] && first[3] !== '1') node.start = Number(first[3]);
  let item = null;
  while (at < lines.length) {
    const found = marker.exec(lines[at]);
    if (found && found[1].length > first[1].length + 1 && item && depth < 20) at = list(item, lines, at, depth + 1);
    else if (found && found[1].length >= first[1].length && Boolean(found[3]) === Boolean(first[3])) {
      item = element('li', ...inline(found[4]));
      node.append(item);
      at += 1;
    } else if (!found && item && /^\s+\S/.test(lines[at])) {
      item.append(element('br'), ...inline(lines[at].trim()));
      at += 1;
    } else break;
  }
  parent.append(node);
  return at;
}

function table(parent, lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
  const row = (line, kind) => element('tr', ...cells(line).map((cell) => element(kind, ...inline(cell))));
  const body = takeWhile(lines, at + 2, (line) => line.includes('|') && line.trim());
  parent.append(element('table', element('thead', row(lines[at], 'th')), element('tbody', ...body.map((line) => row(line, 'td')))));
  return at + 2 + body.length;
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[^*]*\S)?)\*\*|(?<![\w*])[*_]([^\s*_](?:[^*_]*[^\s*_])?)[*_](?![\w*])|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    if (found[1]) nodes.push(element('code', found[2]));
    else if (found[3]) nodes.push(element('strong', ...inline(found[3])));
    else if (found[4]) nodes.push(element('em', ...inline(found[4])));
    else {
      const link = element('a', found[5]);
      link.href = found[6];
      link.rel = 'noopener noreferrer nofollow';
      link.target = '_blank';
      nodes.push(link);
    }
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== '');
}
