// Asks a gateway by JSON, as ask.cc does by gRPC: its input has a call's name and its JSON per line.
// Usage: node ask.mjs URL

import { createInterface } from "node:readline";

const hex = (number) => {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, Number(number));
  return view.getUint32(0).toString(16).padStart(8, "0");
};

for await (const line of createInterface({ input: process.stdin })) {
  const at = line.indexOf(" ");
  const url = `${process.argv[2]}/dlm.v1.LanguageModel/${line.slice(0, at)}`;
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(url, { method: "POST", headers, body: line.slice(at + 1) });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.message);
  const { log10Probs, matchedOrders } = found.scores?.[0] ?? found;
  const states = (found.states ?? []).map((one) => Buffer.from(one, "base64").toString("hex"));
  console.log([log10Probs.map(hex), matchedOrders, states].map((one) => one.join(" ")).join());
}
