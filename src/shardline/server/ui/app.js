// The frame of the page: views, theme, key, and the feed of /cluster that all views share.

import { byId, number } from "./dom.js";
import { askForKey, call, events } from "./server.js";
import { openChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { openProof } from "./prove.js";

const VIEWS = ["chat", "cluster", "prove"];

function showView() {
  const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  for (const view of VIEWS) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "chat") byId("prompt").focus();
  if (latest) showCluster(latest, history);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
function showTheme() {
  const chosen = localStorage.getItem("theme");
  document.documentElement.classList.toggle("dark", chosen ? chosen === "dark" : dark.matches);
}
byId("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.classList.contains("dark") ? "light" : "dark");
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

byId("key").addEventListener("click", async () => {
  if (await askForKey("The key that this server wants. It is kept in this tab only.")) restartFeed();
});

// The feed: one stream while the page is visible, with the history first and a second's news after it.

const KEPT = 600;
let latest = null;
let history = null;
let feed = null;

function showStatus(kind, text) {
  byId("status").className = `status ${kind}`;
  byId("status-text").textContent = text;
}

function addToHistory(now) {
  if (now.history) {
    history = now.history;
    return;
  }
  history ??= { times: [], series: Object.fromEntries([...Object.keys(now.rates), "first_token"].map((name) => [name, []])), busy: [] };
  history.times.push(now.time);
  for (const [name, column] of Object.entries(history.series)) {
    column.push(name === "first_token" ? now.first_token.p50 : now.rates[name]);
  }
  now.replicas.forEach((replica, index) => replica.ranks.forEach((rank, place) => {
    history.busy[index] ??= [];
    history.busy[index][place] ??= [];
    history.busy[index][place].push(Math.round(100 * rank.busy));
  }));
  const columns = [history.times, ...Object.values(history.series), ...history.busy.flat()];
  for (const column of columns) if (column.length > KEPT) column.shift();
}

function take(now) {
  latest = now;
  addToHistory(now);
  const kinds = { ready: "good", starting: "warn", recovering: "warn", draining: "warn", dead: "bad" };
  const speed = number(now.rates.generation_tokens_per_second);
  showStatus(kinds[now.state] || "warn", now.state === "ready" ? `${speed} tok/s` : now.state);
  byId("served").textContent = now.model;
  byId("served").title = `Shardline ${now.version}`;
  showCluster(now, history);
}

async function follow(signal) {
  for (let pause = 1; !signal.aborted; pause = Math.min(8, 2 * pause)) {
    try {
      const answer = await call("cluster", { signal, accept: "text/event-stream" });
      if (answer.headers.get("content-type").includes("json")) { // a router, which is asked again and again
        take(await answer.json());
        pause = 0.5;
      } else {
        for await (const now of events(answer)) {
          take(now);
          pause = 0.5;
        }
        if (!signal.aborted) showStatus("bad", "not connected");
      }
    } catch (error) {
      if (signal.aborted) return;
      showStatus("bad", error.status === 401 ? "needs a key" : error.status ? error.message : "not connected");
      if (error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
  }
}

function restartFeed() {
  feed?.abort();
  feed = new AbortController();
  if (!document.hidden) follow(feed.signal);
}

addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", restartFeed);
openChat();
openProof();
showView();
restartFeed();
