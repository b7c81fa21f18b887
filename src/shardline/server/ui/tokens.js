// Tokens with their probabilities: how a stream's tokens become spans, and the box that explains one.

import { byId, make } from "./dom.js";

const encoder = new TextEncoder();

/** The entries of an event's logprobs as pieces of text. Tokens that share a character are one piece. */
export function pieces(entries, text) {
  const decoder = new TextDecoder("utf-8");
  const found = [];
  let open = [];
  let joined = "";
  for (const entry of entries) {
    const part = decoder.decode(new Uint8Array(entry.bytes ?? encoder.encode(entry.token)), { stream: true });
    open.push({ token: entry.token, logprob: entry.logprob, top: (entry.top_logprobs || []).map((t) => [t.token, t.logprob]) });
    if (part) {
      found.push({ text: part, tokens: open });
      joined += part;
      open = [];
    }
  }
  // Where the server has held text back or taken marks out, the tokens do not spell it.
  return joined === text && !open.length ? found : [{ text, tokens: entries.length ? [...found.flatMap((f) => f.tokens), ...open] : [] }];
}

const shade = (probability) => (probability < 0.1 ? 1 : probability < 0.3 ? 2 : probability < 0.6 ? 3 : probability < 0.85 ? 4 : 5);

/** A piece as an element. */
export function span(piece) {
  if (!piece.tokens.length) return document.createTextNode(piece.text);
  const least = Math.min(...piece.tokens.map((token) => Math.exp(token.logprob)));
  const element = make("span", { class: `token p${shade(least)}` }, piece.text);
  element.tokens = piece.tokens;
  return element;
}

function line(token, logprob, chosen) {
  const probability = Math.exp(logprob);
  const share = make("i");
  share.style.width = `${100 * probability}%`;
  return make("div", { class: chosen ? "chosen" : "" },
    make("code", {}, JSON.stringify(token).slice(1, -1)),
    make("span", { class: "share" }, share),
    make("b", {}, probability >= 0.001 ? `${(100 * probability).toFixed(1)}%` : "<0.1%"));
}

function explain(element) {
  const tip = byId("tip");
  tip.replaceChildren();
  for (const token of element.tokens.slice(0, 4)) {
    if (!token.top.some(([text]) => text === token.token)) tip.append(line(token.token, token.logprob, true));
    for (const [text, logprob] of token.top) tip.append(line(text, logprob, text === token.token));
  }
  tip.hidden = false;
  const box = element.getClientRects()[0];
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const below = box.bottom + 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(8, box.top - tip.offsetHeight - 6)}px`;
}

/** Show the box for whatever token within `area` the pointer is on, or the arrow keys have chosen. */
export function explainTokens(area) {
  let chosen = null;
  const choose = (token) => {
    chosen?.removeAttribute("tabindex");
    chosen = token;
    if (token) explain(token);
    else byId("tip").hidden = true;
  };
  area.addEventListener("pointerover", (event) => choose(event.target.closest?.(".token")));
  area.addEventListener("pointerleave", () => choose(null));
  area.addEventListener("scroll", () => choose(null));
  area.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    const tokens = [...area.querySelectorAll(".token")];
    if (event.key === "Escape" || !tokens.length) return choose(null);
    const step = event.key === "ArrowRight" ? 1 : -1;
    const from = tokens.indexOf(chosen);
    const next = tokens[from < 0 ? (step > 0 ? 0 : tokens.length - 1) : from + step];
    if (!next) return;
    event.preventDefault();
    next.setAttribute("tabindex", "-1");
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    choose(next);
  });
}
