// The view of /cluster.

import { Chart, Plot } from "./chart.js";
import { byId, bytes, make, number, percent, plural, seconds } from "./dom.js";

const CHARTS = {
  generation_tokens_per_second: new Chart("Generated", number),
  prompt_tokens_per_second: new Chart("Prompts read", number),
  first_token: new Chart("First token", seconds),
  running: new Chart("Running", number, { top: 4 }),
  kv_usage: new Chart("KV cache in use", percent, { top: 1 }),
  hit_rate: new Chart("Prefix cache hits", percent, { top: 1 }),
  step_seconds: new Chart("Step", seconds),
  waiting: new Chart("Waiting", number, { top: 4 }),
};

let layout = "";
let ranks = [];

/** Show the state `now`, with ten minutes of `history` that ends with it. */
export function showCluster(now, history) {
  if (byId("cluster").hidden) return;
  if (!byId("charts").childElementCount) byId("charts").append(...Object.values(CHARTS).map((chart) => chart.element));
  const { rates, first_token: first } = now;
  const notes = {
    generation_tokens_per_second: "tokens/s",
    prompt_tokens_per_second: "tokens/s",
    first_token: first.count ? `p95 ${seconds(first.p95)}` : "none for a minute",
    running: "requests",
    waiting: "requests",
    kv_usage: `of ${number(now.replicas.reduce((sum, one) => sum + one.kv_blocks, 0))} blocks`,
  };
  for (const [name, chart] of Object.entries(CHARTS)) {
    const value = name === "first_token" ? first.p50 : rates[name];
    chart.update(value, notes[name] ?? "", history?.times ?? [], history?.series[name] ?? []);
  }
  byId("notices").replaceChildren(...now.notices.map((text) => make("p", { class: "notice" }, text)));
  showHosts(now, history);
  showLast(now.last_request);
}

function showHosts(now, history) {
  const shape = JSON.stringify([now.hosts, now.replicas.map((one) => one.ranks.map((rank) => [rank.host, rank.pid]))]);
  if (shape !== layout) {
    layout = shape;
    ranks = [];
    const hosts = now.hosts.length ? now.hosts : [{ name: "this server", devices: [] }];
    byId("hosts").replaceChildren(legend(), ...hosts.map((host, index) => hostCard(now, host, index)));
  }
  for (const { replica, place, update } of ranks) {
    const one = now.replicas[replica];
    update(one, one.ranks[place], history?.times ?? [], history?.busy[replica]?.[place] ?? []);
  }
}

function legend() {
  return make("div", { class: "legend" },
    make("span", {}, make("i", { class: "busy" }), "computes"),
    make("span", {}, make("i", { class: "wait" }), "waits for other ranks"),
    make("span", {}, make("i"), "has nothing to do"));
}

function hostCard(now, host, index) {
  const about = [host.address, host.cores ? plural(host.cores, "core") : "", host.memory_bytes ? bytes(host.memory_bytes) : "", ...host.devices];
  const cells = now.replicas.flatMap((replica, number) => replica.ranks
    .map((rank, place) => ({ rank, place }))
    .filter(({ rank }) => rank.host === index)
    .map(({ rank, place }) => rankCell(now, number, place, rank)));
  return make("div", { class: "host" },
    make("header", {}, make("h2", {}, host.name), make("span", { class: "fine" }, about.filter(Boolean).join(" · "))),
    make("div", { class: "ranks" }, ...(cells.length ? cells : now.replicas.map((replica, number) => bareCell(number)))));
}

/** A replica whose ranks are not known. */
function bareCell(replica) {
  const name = make("h2");
  ranks.push({ replica, place: 0, update: (one) => { name.textContent = `Replica ${replica}: ${one.alive ? `${one.rates.running} running` : "down"}`; } });
  return make("div", { class: "rank" }, name);
}

function rankCell(now, replica, place, rank) {
  const busy = make("i", { class: "busy" }), wait = make("i", { class: "wait" });
  const share = make("span", { class: "num" }), step = make("dd"), kv = make("dd");
  const plot = new Plot(26);
  const hasContextRanks = now.replicas.some((one) => one.ranks.some((other) => other.cp > 0));
  const where = [`pp ${rank.pp}`, `tp ${rank.tp}`, hasContextRanks ? `cp ${rank.cp}` : "", rank.layers ? `layers ${rank.layers[0]}–${rank.layers[1]}` : ""];
  const cell = make("div", { class: "rank" },
    make("header", {}, make("h2", {}, now.replicas.length > 1 ? `Replica ${replica}, rank ${rank.rank}` : `Rank ${rank.rank}`), share),
    make("div", { class: "place" }, where.filter(Boolean).join(" · ")),
    make("div", { class: "split" }, busy, wait), plot.element,
    make("dl", {}, make("dt", {}, "step"), step, make("dt", {}, "weights"), make("dd", {}, bytes(rank.weight_bytes)),
      make("dt", {}, rank.device === "CPU" ? "threads" : "device"), make("dd", {}, rank.device === "CPU" ? `${rank.threads}` : rank.device),
      make("dt", {}, "KV"), kv));
  const update = (one, shown, times, history) => {
    if (!shown) return;
    busy.style.width = percentWidth(shown.busy);
    wait.style.width = percentWidth(shown.waiting);
    share.textContent = one.alive ? `${percent(shown.busy)} busy` : "down";
    cell.title = `process ${shown.pid}: computes ${percent(shown.busy)}, waits ${percent(shown.waiting)}`;
    step.textContent = seconds(shown.step_seconds);
    kv.textContent = bytes(shown.kv_bytes);
    plot.draw(times.slice(-history.length), history, 100);
  };
  ranks.push({ replica, place, update });
  return cell;
}

const percentWidth = (share) => `${Math.min(100, 100 * share)}%`;

function showLast(request) {
  byId("last").hidden = !request;
  if (!request) return;
  const [choice] = request.choices;
  const phases = [["queued", choice.queued_seconds], ["prefill", choice.prefill_seconds], ["busy", choice.decode_seconds]];
  const total = phases.reduce((sum, [, spent]) => sum + (spent ?? 0), 0);
  const bars = phases.map(([kind, spent]) => {
    const bar = make("i", { class: kind });
    bar.style.width = `${total ? (100 * (spent ?? 0)) / total : 0}%`;
    return bar;
  });
  const names = { queued: ["wait", "waited"], prefill: ["prefill", "read the prompt"], busy: ["busy", "generated"] };
  byId("last").replaceChildren(
    make("h2", {}, "Where the last request's time went"),
    make("div", { class: "split" }, ...bars),
    make("div", { class: "legend" }, ...phases.map(([kind, spent]) => make("span", {}, make("i", { class: names[kind][0] }), `${names[kind][1]} ${seconds(spent)}`)),
      choice.preempted_seconds ? make("span", {}, `of it lost to preemption ${seconds(choice.preempted_seconds)}`) : null,
      make("span", {}, `${plural(choice.num_generation_tokens, "token")}, ${plural(choice.prefill_chunks.length, "chunk")} of prefill, ${choice.num_cached_tokens} cached${request.choices.length > 1 ? `; the first of ${request.choices.length} choices` : ""}`)));
}
