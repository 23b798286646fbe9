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

// A word that the vocabulary lacks; most models have only words in lower case.
function unknownWord(word, id) {
  const cell = make("td", `${word} `, "unknown");
  cell.append(make("small", "(unknown)"));
  if (word !== word.toLowerCase()) {
    const button = make("button", "all lower case");
    button.type = "button";
    button.addEventListener("click", () => {
      at(id).value = at(id).value.toLowerCase();
      shows(score);
    });
    cell.append(" ", button);
  }
  return cell;
}

// A score, and a bar: full where the word is as unlikely as one in a million.
function scoreCell(log10Prob) {
  const cell = number(log10Prob.toFixed(3));
  const bar = Object.assign(document.createElement("meter"), { min: 0, max: 6, value: Math.min(-log10Prob, 6) });
  bar.ariaHidden = "true";
  cell.append(bar);
  return cell;
}

// The phrases of the page, as a request has them; none if there are no lines.
function phrases() {
  const lines = at("phrases").value.split("\n").filter((line) => line.trim());
  const one = (line, at) => {
    const [text, bonus = "2", ...more] = line.split(/[=\t]/);
    if (more.length || !bonus.trim() || !Number.isFinite(Number(bonus))) throw new Error(`Phrase ${at + 1}: its bonus is not a number.`);
    return { text: text.trim(), bonus: Number(bonus) };
  };
  return lines.length ? { phrases: { phrases: lines.map(one) } } : {};
}

const tokensOf = (text) => [...text.split(/[ \t\r\n]+/).filter(Boolean), "</s>"];

function showSentence(text, one, id, total, words) {
  const tokens = tokensOf(text);
  const log10Prob = Number(one.log10Prob);
  const facts = [`log10 P ${log10Prob.toFixed(3)} for ${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`, `perplexity ${shown(10 ** (-log10Prob / tokens.length))}`];
  if (one.oovs) facts.push(`${one.oovs} unknown`);
  if (one.bonus) facts.push(`with phrases ${(log10Prob + Number(one.bonus)).toFixed(3)}`);
  at(total).textContent = facts.join(", ");
  at(words).replaceChildren(
    ...tokens.map((word, i) =>
      row(
        one.oov[i] ? unknownWord(word, id) : word,
        scoreCell(Number(one.log10Probs[i])),
        `${one.matchedOrders[i]}-gram`,
        answeredBy(one.sources[i], one.shards[i]),
      ),
    ),
  );
}

let asked = 0; // an answer to an older sentence is not shown

async function score() {
  const text = at("sentence").value;
  const other = at("other").value.trim();
  const mine = ++asked;
  const sentences = other ? [text, other] : [text];
  const [{ scores }, { words }] = await Promise.all([
    ask("Score", { sentences, withShards: true, ...phrases() }),
    ask("NextWords", { text, count: 8 }),
  ]);
  if (mine !== asked) return;
  showSentence(text, scores[0], "sentence", "total", "words");
  at("other-side").hidden = !other;
  at("difference").textContent = "";
  if (other) {
    showSentence(other, scores[1], "other", "other-total", "other-words");
    const [first, second] = scores.map((one) => Number(one.log10Prob) + Number(one.bonus ?? 0));
    const counted = scores.some((one) => one.bonus) ? ", phrases included" : "";
    const which = first < second ? "The second is likelier" : "The first is likelier";
    at("difference").textContent = first === second ? "Both are equally likely" : `${which}: log10 P differs by ${Math.abs(first - second).toFixed(3)}${counted}`;
  }
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
    ["queries/s", looks.length > 1 ? shown(queries / seconds) : "–"],
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
for (const id of ["sentence", "other", "phrases", "token"]) {
  at(id).addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => shows(score), WAIT_MS);
  });
}
shows(score);
shows(look);
setInterval(() => document.hidden || shows(look), LOOK_MS);
