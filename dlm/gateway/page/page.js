// Asks the gateway that serves this page, and shows the answers as text.
"use strict";

const WAIT_MS = 150; // after the last key
const LOOK_MS = 2000; // between looks at the cluster
const LOOKS = 6; // numbers are of the time between the first and the last of so many
const at = (id) => document.getElementById(id);

function make(tag, text, className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

function row(...cells) {
  const line = document.createElement("tr");
  line.append(...cells.map((one) => (typeof one === "object" ? one : make("td", one))));
  return line;
}

const number = (text) => make("td", text, "number");
const shown = (count) => Math.round(count).toLocaleString("en");

async function ask(call, request) {
  const headers = { "Content-Type": "application/json" };
  if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
  const body = JSON.stringify(request);
  const reply = await fetch(`/dlm.v1.LanguageModel/${call}`, { method: "POST", headers, body });
  const found = await reply.json();
  if (reply.ok) return found;
  if (reply.status === 401) at("token-row").hidden = false;
  throw new Error(found.message);
}

// ------------------------------------------------------------------ the sentence

function answeredBy(source, shard) {
  if (source === "SOURCE_BIGRAM_FALLBACK") return "2-grams alone: no server answered";
  if (source === "SOURCE_LOCAL_FALLBACK") return "the local fallback";
  return shard ? `shard ${shard - 1}` : "this gateway";
}

function unknownWord(word) {
  const cell = make("td", `${word} `, "unknown");
  cell.append(make("small", "(unknown)"));
  return cell;
}

let asked = 0; // an answer to an older sentence is not shown

async function score() {
  const text = at("sentence").value;
  const mine = ++asked;
  const [{ scores }, { words }] = await Promise.all([
    ask("Score", { sentences: [text], withShards: true }),
    ask("NextWords", { text, count: 8 }),
  ]);
  if (mine !== asked) return;
  const [one] = scores;
  const tokens = [...text.split(/[ \t\r\n]+/).filter(Boolean), "</s>"];
  const unknown = one.oovs ? `, ${one.oovs} unknown` : "";
  at("total").textContent = `log10 P ${Number(one.log10Prob).toFixed(3)} for ${tokens.length} tokens${unknown}`;
  at("words").replaceChildren(
    ...tokens.map((word, i) =>
      row(
        one.oov[i] ? unknownWord(word) : word,
        number(Number(one.log10Probs[i]).toFixed(3)),
        `${one.matchedOrders[i]}-gram`,
        answeredBy(one.sources[i], one.shards[i]),
      ),
    ),
  );
  at("next").replaceChildren(
    ...words.map(({ word, log10Prob }) => {
      const button = make("button", `${word} `);
      button.type = "button";
      button.append(make("small", Number(log10Prob).toFixed(2)));
      button.disabled = word === "</s>" || word === "<unk>";
      button.addEventListener("click", () => {
        at("sentence").value = `${at("sentence").value.trimEnd()} ${word}`.trimStart();
        at("sentence").focus();
        shows(score);
      });
      const item = document.createElement("li");
      item.append(button);
      return item;
    }),
  );
}

// ------------------------------------------------------------------- the cluster

const looks = []; // [time, traffic], oldest first

// The upper end of the bucket that has this share of the calls.
function within(calls, ends, share) {
  const all = calls.reduce((sum, count) => sum + count, 0);
  let sum = 0;
  for (let i = 0; all && i < ends.length; i++) {
    sum += calls[i];
    if (sum >= share * all) return `≤ ${+(1000 * ends[i]).toPrecision(3)} ms`;
  }
  return all ? `> ${1000 * ends.at(-1)} ms` : "–";
}

function showTraffic(traffic) {
  const numbers = (list) => list.map(Number);
  const now = {
    ...Object.fromEntries(["queries", "localHits", "fallbacks"].map((name) => [name, Number(traffic[name])])),
    calls: numbers(traffic.calls),
    shards: numbers(traffic.shards),
  };
  looks.push([performance.now(), now]);
  if (looks.length > LOOKS) looks.shift();
  const [began, then] = looks[0];
  const seconds = (performance.now() - began) / 1000;
  const since = (name) => Math.max(now[name] - then[name], 0);
  const each = (name) => now[name].map((count, i) => Math.max(count - (then[name][i] ?? 0), 0));
  const queries = since("queries");
  const share = (count) => (queries ? `${((100 * Math.min(count, queries)) / queries).toFixed(1)} %` : "–");
  const sent = each("shards");
  const mean = sent.reduce((sum, count) => sum + count, 0) / sent.length;
  const cards = [
    ["queries per second", looks.length > 1 ? shown(queries / seconds) : "–"],
    ["p50 of a call", within(each("calls"), traffic.withinS, 0.5)],
    ["p99 of a call", within(each("calls"), traffic.withinS, 0.99)],
    ["local hits", share(since("localHits"))],
    ["fallback", share(since("fallbacks"))],
    ["balance", mean ? (Math.max(...sent) / mean).toFixed(2) : "–"],
  ];
  at("traffic").replaceChildren(
    ...cards.map(([name, value]) => {
      const card = document.createElement("div");
      card.append(make("dt", name), make("dd", value));
      return card;
    }),
  );
  at("window").textContent = looks.length > 1 ? `Of the last ${Math.round(seconds)} s, by this gateway. Balance: queries to the busiest shard, over the mean.` : "Counting ...";
}

async function look() {
  const { models, servers, traffic } = await ask("Models", {});
  const [one] = models;
  const kind = one.kind === "full" ? "" : `, ${one.kind.replaceAll("_", " ")}: servers fail`;
  const counts = one.counts.map((count) => shown(Number(count))).join(" + ");
  at("model").textContent = `Model ${one.model.slice(0, 12)}, order ${one.order}${kind}: ${counts} n-grams`;
  showTraffic(traffic);
  at("servers").replaceChildren(
    ...servers.map((server) =>
      row(
        server.shard,
        make("td", server.state, server.ready ? "" : "down"),
        server.ready ? "yes" : "no",
        number(server.delayMs ? `${server.delayMs.toFixed(1)} ms` : "–"),
        number(shown(Number(traffic.shards[server.shard] ?? 0))),
      ),
    ),
  );
  if (!servers.length) at("servers").replaceChildren(row("none: the model is in this gateway", "", "", "", ""));
}

// Shows a failure until the same thing succeeds.
const failures = new Map();
async function shows(work) {
  try {
    await work();
    failures.delete(work);
  } catch (error) {
    failures.set(work, error instanceof TypeError ? "The gateway does not answer." : error.message);
  }
  at("problem").textContent = [...new Set(failures.values())].join(" ");
}

let timer;
for (const id of ["sentence", "token"]) {
  at(id).addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => shows(score), WAIT_MS);
  });
}
shows(score);
shows(look);
setInterval(() => document.hidden || shows(look), LOOK_MS);
