// Runs a prompt again, alone or beside others, and compares every token and log probability.

import { byId, make, plural, seconds } from "./dom.js";
import { call, events } from "./server.js";

const BUTTONS = ["prove-alone", "prove-again", "prove-busy", "prove-cold"];
let reference = null; // { body, tokens, salt }
let stopping = null;

export function openProof() {
  byId("prove-form").addEventListener("submit", (event) => { event.preventDefault(); runFirst(); });
  byId("prove-again").addEventListener("click", () => runAgain("alone", {}));
  byId("prove-busy").addEventListener("click", () => runAgain(`beside ${plural(Number(byId("prove-load").value) || 1, "other request")}`, { busy: true }));
  byId("prove-cold").addEventListener("click", () => runAgain("nothing cached", { cold: true }));
  byId("prove-stop").addEventListener("click", () => stopping?.abort());
}

const salt = () => `proof-${Date.now()}-${Math.random()}`;

function question() {
  return {
    messages: [{ role: "user", content: byId("prove-prompt").value }],
    temperature: Number(byId("prove-temperature").value),
    seed: Number(byId("prove-seed").value),
    max_tokens: Number(byId("prove-tokens").value) || 64,
    logprobs: true, top_logprobs: 3, cache_salt: salt(),
  };
}

/** The tokens of an answer with their numbers, as the server has sent them. */
async function run(body, signal) {
  const began = performance.now();
  const answer = await (await call("v1/chat/completions", { body, signal })).json();
  const [choice] = answer.choices;
  return {
    tokens: choice.logprobs.content, finish: choice.finish_reason, print: answer.system_fingerprint ?? "",
    text: choice.message.content ?? "", took: (performance.now() - began) / 1000,
  };
}

/** Requests that run until they are stopped; resolves once all of them get tokens. */
function keepBusy(count, signal) {
  const started = [];
  for (let index = 0; index < count; index++) {
    started.push(new Promise((resolve, reject) => {
      (async () => {
        while (!signal.aborted) {
          const body = {
            messages: [{ role: "user", content: `Request ${index} of ${count}: tell a long story about the number ${Math.random()}.` }],
            max_tokens: 256, temperature: 1, stream: true,
          };
          for await (const event of events(await call("v1/chat/completions", { body, signal }))) if (event) resolve();
        }
      })().catch((error) => (error.name === "AbortError" ? resolve() : reject(error)));
    }));
  }
  return Promise.all(started);
}

async function guarded(work) {
  stopping = new AbortController();
  for (const id of BUTTONS) byId(id).disabled = true;
  byId("prove-stop").hidden = false;
  try {
    await work(stopping.signal);
  } catch (error) {
    if (error.name !== "AbortError") verdict("bad", error.message);
  } finally {
    stopping.abort();
    stopping = null;
    byId("prove-stop").hidden = true;
    for (const id of BUTTONS) byId(id).disabled = id !== "prove-alone" && !reference;
  }
}

function verdict(kind, text) {
  byId("prove-verdict").className = `verdict ${kind}`;
  byId("prove-verdict").textContent = text;
}

function runFirst() {
  return guarded(async (signal) => {
    reference = null;
    byId("prove-runs").replaceChildren();
    verdict("", "Running …");
    const body = question();
    const result = await run(body, signal);
    reference = { body, ...result, again: 0, equal: 0 };
    byId("prove-runs").append(runCard("The answer to compare with", result, null));
    verdict("", `${plural(result.tokens.length, "token")}. Now run it again, in any way.`);
  });
}

function runAgain(how, { busy = false, cold = false }) {
  return guarded(async (signal) => {
    verdict("", "Running …");
    const others = new AbortController();
    signal.addEventListener("abort", () => others.abort());
    let result;
    try {
      if (busy) await keepBusy(Math.min(32, Number(byId("prove-load").value) || 1), others.signal);
      result = await run({ ...reference.body, ...(cold ? { cache_salt: salt() } : {}) }, signal);
    } finally {
      others.abort();
    }
    const compared = compare(reference, result);
    reference.again++;
    reference.equal += compared.every(Boolean) ? 1 : 0;
    byId("prove-runs").prepend(runCard(how, result, compared));
    if (reference.equal === reference.again) verdict("good", `Equal: ${reference.equal} of ${plural(reference.again, "run")}, in every token and every log probability.`);
    else verdict("bad", `${reference.again - reference.equal} of ${plural(reference.again, "run")} differ.`);
  });
}

/** For each token, whether both have it with the same log probability, and the same likeliest others. */
function compare(one, other) {
  const length = Math.max(one.tokens.length, other.tokens.length);
  return Array.from({ length }, (_, index) => JSON.stringify(one.tokens[index]) === JSON.stringify(other.tokens[index]));
}

function runCard(how, result, compared) {
  const cells = (compared ?? result.tokens.map(() => null)).map((same, index) => make("i", {
    class: same === null ? "first" : same ? "same" : "other",
    title: result.tokens[index] ? `${JSON.stringify(result.tokens[index].token)} ${result.tokens[index].logprob}` : "missing",
  }));
  const equal = compared?.filter(Boolean).length;
  const first = compared?.indexOf(false);
  const said = !compared ? "" : first < 0 ? `equal: ${equal} of ${compared.length}` : `differs from token ${first + 1} on`;
  return make("li", { class: `run ${!compared ? "" : first < 0 ? "good" : "bad"}` },
    make("header", {}, make("h2", {}, how), make("span", { class: "fine num" }, `${seconds(result.took)} · ${result.finish} · ${result.print}`), make("span", { class: "result" }, said)),
    make("div", { class: "cells", "aria-hidden": "true" }, ...cells),
    make("div", { class: "text" }, result.text));
}
