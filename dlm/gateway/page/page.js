// Asks the gateway that serves this page, and shows the answers as text.
"use strict";

const WAIT_MS = 150; // after the last key
const LOOK_MS = 2000; // between looks at the servers
const at = (id) => document.getElementById(id);

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

function row(...cells) {
  const line = document.createElement("tr");
  line.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  return line;
}

const answeredBy = (source) => (source ?? "SOURCE_FULL").replace("SOURCE_", "").replace("_", " ").toLowerCase();

async function score() {
  const text = at("sentence").value;
  const [{ scores }, { words }] = await Promise.all([
    ask("Score", { sentences: [text] }),
    ask("NextWords", { text, count: 8 }),
  ]);
  const [one] = scores;
  const tokens = [...text.split(/[ \t\r\n]+/).filter(Boolean), "</s>"];
  at("total").textContent = `log10 probability ${one.log10Prob}, ${one.oovs} unknown words`;
  at("words").replaceChildren(
    ...tokens.map((word, i) =>
      row(one.oov[i] ? `${word} (unknown)` : word, one.log10Probs[i], one.matchedOrders[i], answeredBy(one.sources[i])),
    ),
  );
  at("next").replaceChildren(
    ...words.map((next) => Object.assign(document.createElement("li"), { textContent: `${next.word}  ${next.log10Prob}` })),
  );
}

async function look() {
  const { models, servers } = await ask("Models", {});
  const [one] = models;
  at("model").textContent = `model ${one.model} (${one.kind}), order ${one.order}, n-grams ${one.counts.join(" + ")}`;
  at("servers").replaceChildren(
    ...servers.map((server) => row(server.shard, server.state, server.ready ? "yes" : "no", server.delayMs.toFixed(1))),
  );
}

// Shows a failure until the same thing succeeds.
async function shown(work) {
  try {
    await work();
    at("problem").textContent = "";
  } catch (error) {
    at("problem").textContent = error.message;
  }
}

let timer;
for (const id of ["sentence", "token"]) {
  at(id).addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => shown(score), WAIT_MS);
  });
}
shown(score);
shown(look);
setInterval(() => document.hidden || shown(look), LOOK_MS);
