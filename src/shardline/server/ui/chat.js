// Conversations with the model.

import { byId, make, number, plural, seconds } from "./dom.js";
import { chat, ServerError } from "./server.js";
import { forget, load, save } from "./store.js";
import { explainTokens, pieces, span } from "./tokens.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

let conversations = [];
let current = null;
let running = null; // the AbortController of the answer that comes

const form = (name) => document.querySelector(`#params [name=${name}]`);

export async function openChat() {
  restoreParameters();
  explainTokens(byId("messages"));
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", startNew);
  const prompt = byId("prompt");
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  prompt.addEventListener("input", fitPrompt);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
    if (event.altKey && event.code === "KeyN") { event.preventDefault(); startNew(); }
  });
  toggle("show-side", () => byId("side").classList.toggle("shown"));
  toggle("show-params", () => !(byId("params").hidden = !byId("params").hidden));
  byId("params").addEventListener("input", keepParameters);
  try {
    conversations = await load();
  } catch {
    byId("side").append(make("p", { class: "wrong" }, "This browser keeps nothing: conversations end with the tab."));
  }
  current = conversations[0] ?? null;
  if (!current) startNew();
  else show();
}

function toggle(id, change) {
  byId(id).addEventListener("click", () => byId(id).setAttribute("aria-expanded", String(Boolean(change()))));
}

function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

// Parameters: those that are left empty are left to the server.

function restoreParameters() {
  const kept = JSON.parse(localStorage.getItem("parameters") || "{}");
  for (const field of document.querySelectorAll("#params [name]")) {
    if (!(field.name in kept)) continue;
    if (field.type === "checkbox") field.checked = kept[field.name];
    else field.value = kept[field.name];
  }
  tint();
}

function keepParameters() {
  const fields = [...document.querySelectorAll("#params [name]")];
  const kept = fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
  localStorage.setItem("parameters", JSON.stringify(Object.fromEntries(kept)));
  byId("params-problem").textContent = "";
  tint();
}

const tint = () => byId("messages").classList.toggle("tinted", form("tint").checked);

function parameters() {
  const body = { stream_options: { include_usage: true }, return_metrics: true };
  for (const name of NUMBERS) if (form(name).value !== "") body[name] = Number(form(name).value);
  const stop = form("stop").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (form("tools").value.trim()) {
    let tools;
    try { tools = JSON.parse(form("tools").value); } catch (error) { throw new ServerError(`Tools: ${error.message}`, 400); }
    if (!Array.isArray(tools)) throw new ServerError("Tools must be a JSON list.", 400);
    if (tools.length) body.tools = tools;
  }
  if (form("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/** The messages as the API takes them. */
function history(messages) {
  const system = form("system").value.trim();
  const past = messages.map(({ role, content, tool_calls, tool_call_id }) => {
    const message = { role, content: content ?? "" };
    if (tool_calls?.length) message.tool_calls = tool_calls;
    if (tool_call_id) message.tool_call_id = tool_call_id;
    return message;
  });
  return system ? [{ role: "system", content: system }, ...past] : past;
}

// What the user does.

function startNew() {
  stop();
  current = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", changed: Date.now(), messages: [] };
  byId("side").classList.remove("shown");
  show();
  byId("prompt").focus();
}

function stop() {
  running?.abort();
}

function send() {
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  fitPrompt();
  current.title ||= text.slice(0, 80);
  current.messages.push({ role: "user", content: text });
  answer();
}

function regenerate() {
  if (running) return;
  while (current.messages.at(-1)?.role === "assistant") current.messages.pop();
  answer();
}

function giveResult(callId, result) {
  const open = current.messages.at(-1).tool_calls.map((one) => one.id);
  current.results = { ...current.results, [callId]: result };
  if (open.every((id) => id in current.results)) {
    for (const id of open) current.messages.push({ role: "tool", tool_call_id: id, content: current.results[id] });
    current.results = {};
    answer();
  } else show();
}

async function remove(conversation) {
  if (conversation === current) stop();
  conversations = conversations.filter((one) => one !== conversation);
  await forget(conversation.id).catch(() => {});
  if (conversation !== current) return showList();
  current = conversations[0] ?? null;
  if (current) show();
  else startNew();
}

async function keep(conversation) {
  conversation.changed = Date.now();
  if (!conversations.includes(conversation)) conversations.push(conversation);
  conversations.sort((a, b) => b.changed - a.changed);
  await save(conversation).catch(() => {});
  showList();
}

/** Have the model answer, and show the answer as it comes. */
async function answer() {
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "", pieces: [], tool_calls: [], facts: "", error: "" };
  const began = performance.now();
  let first = 0, finished = "", usage = null;
  running = new AbortController();
  showRunning();
  let body;
  try {
    body = { messages: history(conversation.messages), ...parameters() };
  } catch (error) {
    byId("params-problem").textContent = error.message;
    byId("params").hidden = false;
    running = null;
    return show();
  }
  conversation.messages.push(message);
  keep(conversation);
  show();
  const view = new AnswerView(message);
  try {
    for await (const event of chat(body, running.signal)) {
      usage = event.usage ?? usage;
      if (event.metrics) message.timeline = event.metrics.choices?.[0];
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      const delta = choice.delta ?? {};
      if (!first && (delta.content || delta.reasoning || delta.tool_calls)) first = performance.now();
      if (delta.reasoning) message.reasoning += delta.reasoning;
      for (const part of delta.tool_calls ?? []) addCall(message.tool_calls, part);
      const entries = choice.logprobs?.content ?? [];
      const added = delta.content ? pieces(entries, delta.content) : [];
      message.content += delta.content ?? "";
      message.pieces.push(...added);
      finished = choice.finish_reason ?? finished;
      if (conversation === current) view.update(added);
    }
    if (!finished) throw new ServerError("The connection to the server has ended in the middle of the answer.", 0);
  } catch (error) {
    if (error.name === "AbortError") finished = "stopped";
    else message.error = error.message;
  }
  const took = (performance.now() - began) / 1000;
  const count = usage?.completion_tokens ?? message.pieces.reduce((sum, piece) => sum + piece.tokens.length, 0);
  const decode = message.timeline?.decode_seconds ?? took - (first - began) / 1000;
  message.facts = [
    count ? plural(count, "token") : "",
    count > 1 && decode > 0 ? `${number((count - 1) / decode)} tok/s` : "",
    first ? `first after ${seconds((first - began) / 1000)}` : "",
    usage?.prompt_tokens ? `prompt ${usage.prompt_tokens}${message.timeline?.num_cached_tokens ? `, ${message.timeline.num_cached_tokens} cached` : ""}` : "",
    finished && finished !== "stop" ? finished : "",
  ].filter(Boolean).join(" · ");
  running = null;
  showRunning();
  await keep(conversation);
  if (conversation === current) show();
}

function addCall(calls, part) {
  const one = (calls[part.index ?? calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  one.id ||= part.id ?? "";
  one.function.name += part.function?.name ?? "";
  one.function.arguments += part.function?.arguments ?? "";
}

// What the user sees.

function showRunning() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
}

function showList() {
  byId("conversations").replaceChildren(...conversations.map((one) => make("li", { class: one === current ? "open" : "" },
    make("button", { type: "button", "aria-current": one === current ? "true" : null, onclick: () => { stop(); current = one; byId("side").classList.remove("shown"); show(); } }, one.title || "New chat"),
    make("button", { type: "button", class: "forget", "aria-label": `Delete ${one.title}`, title: "Delete", onclick: () => remove(one) }, "×"))));
}

function show() {
  showList();
  showRunning();
  byId("chat-title").textContent = current.title;
  const shown = current.messages.map((message, index) => element(message, index === current.messages.length - 1));
  byId("messages").replaceChildren(...(shown.length ? shown : [make("p", { class: "empty" }, "Nothing said yet.")]));
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

function element(message, isLast) {
  const text = make("div", { class: "text" }, ...(message.pieces?.length ? message.pieces.map(span) : [message.content ?? ""]));
  const parts = [make("div", { class: "who" }, NAMES[message.role] ?? message.role)];
  if (message.reasoning) parts.push(make("details", { class: "fold" }, make("summary", {}, "Reasoning"), make("div", { class: "text" }, message.reasoning)));
  parts.push(text);
  for (const one of message.tool_calls ?? []) parts.push(toolCall(one, isLast && !running));
  if (message.error) parts.push(make("p", { class: "wrong", role: "alert" }, message.error));
  if (message.role === "assistant" && !(isLast && running)) {
    const copy = make("button", { type: "button", class: "quiet", onclick: () => navigator.clipboard?.writeText(message.content) }, "Copy");
    const again = isLast ? make("button", { type: "button", class: "quiet again", onclick: regenerate }, "Regenerate") : null;
    parts.push(make("div", { class: "facts" }, message.facts ?? "", copy, again));
  }
  return make("article", { class: `message ${message.role}` }, ...parts);
}

function toolCall(one, takesResult) {
  let args = one.function.arguments;
  try { args = JSON.stringify(JSON.parse(args), null, 2); } catch { /* it is not whole yet */ }
  const card = make("div", { class: "call" }, make("h2", {}, one.function.name), make("pre", {}, args));
  const given = current.results?.[one.id];
  if (given !== undefined) card.append(make("pre", {}, given));
  else if (takesResult) {
    const input = make("input", { "aria-label": `Result of ${one.function.name}`, placeholder: "The tool's result" });
    card.append(make("form", { onsubmit: (event) => { event.preventDefault(); giveResult(one.id, input.value); } }, input, make("button", {}, "Send result")));
  }
  return card;
}

/** The answer that comes: what is new is added at its end, so that a long one costs no more than a short one. */
class AnswerView {
  constructor(message) {
    this.message = message;
    this.article = byId("messages").lastElementChild;
    this.text = this.article.querySelector(".text");
    this.text.replaceChildren();
    this.text.classList.add("caret");
    this.reasoning = null;
    this.calls = [];
  }

  update(added) {
    const area = byId("messages");
    const follows = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    if (this.message.reasoning) {
      if (!this.reasoning) {
        this.reasoning = make("div", { class: "text" });
        this.text.before(make("details", { class: "fold" }, make("summary", {}, "Reasoning"), this.reasoning));
      }
      this.reasoning.textContent = this.message.reasoning;
    }
    this.text.append(...added.map(span));
    if (this.message.tool_calls.length) {
      for (const card of this.calls) card.remove();
      this.calls = this.message.tool_calls.filter(Boolean).map((one) => toolCall(one, false));
      this.article.append(...this.calls);
    }
    if (follows) area.scrollTop = area.scrollHeight;
  }
}
