// Scores a sentence and takes two steps of a beam search, with fetch: in Node 18 or later, or in a
// page that the gateway's own address serves.
// Usage: node fetch.mjs [URL] [TOKEN]

const [url = "http://localhost:8080", token] = globalThis.process?.argv.slice(2) ?? [""];

export async function ask(call, request) {
  const headers = { "Content-Type": "application/json", "Connect-Timeout-Ms": "1000" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const body = JSON.stringify(request);
  const reply = await fetch(`${url}/dlm.v1.LanguageModel/${call}`, { method: "POST", headers, body });
  const found = await reply.json();
  if (!reply.ok) throw new Error(`${found.reason ?? found.code}: ${found.message}`);
  return found;
}

const { scores } = await ask("Score", { sentences: ["the man went home"] });
console.log(scores[0].log10Prob, scores[0].log10Probs);

// A beam of two: each step scores every word after every state, and keeps the two best.
let beam = [{ words: [], total: 0, state: "" }];
for (const words of [["the", "a", "there"], ["man", "is"]]) {
  const found = await ask("Extend", { states: beam.map((one) => one.state), words });
  beam = beam
    .flatMap((one, row) =>
      words.map((word, column) => {
        const at = row * words.length + column;
        const total = one.total + Number(found.log10Probs[at]);
        return { words: [...one.words, word], total, state: found.states[at] };
      }),
    )
    .sort((a, b) => b.total - a.total)
    .slice(0, 2);
}
for (const one of beam) console.log(one.total, one.words.join(" "));
