// The `openai` package for Node: `node openai_client.mjs URL MODEL`.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { VERSION } from "openai/version";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const prompt = "one two three one two three one";
const messages = [{ role: "user", content: "Name three colours." }];
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};

const chat = (settings = {}) =>
  client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, ...settings });
const completion = (settings = {}) =>
  client.completions.create({ model, prompt, max_tokens: 16, temperature: 0, ...settings });

async function rejected(param, settings) {
  await assert.rejects(chat(settings), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.param, param);
    return true;
  });
}

const checks = {
  async models() {
    const found = [];
    for await (const card of client.models.list()) found.push(card.id);
    assert.deepEqual(found, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async wholeChat() {
    const reply = await chat();
    assert.ok(reply.choices[0].message.content);
    assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
  },
  async streamedChatWithUsage() {
    const events = [];
    const stream = await chat({ stream: true, stream_options: { include_usage: true } });
    for await (const event of stream) events.push(event);
    const text = events.flatMap((event) => event.choices.map((choice) => choice.delta.content ?? ""));
    assert.equal(text.join(""), (await chat()).choices[0].message.content);
    assert.ok(events.at(-1).usage.completion_tokens > 0);
  },
  async streamHelper() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 16, temperature: 0 });
    assert.equal(await stream.finalContent(), (await chat()).choices[0].message.content);
  },
  async leavingAStream() {
    const stream = await chat({ stream: true, max_tokens: 200 });
    for await (const _ of stream) break;
    assert.ok((await chat()).choices[0].message.content);
  },
  async seedRepeats() {
    const texts = [];
    for (const seed of [7, 7, 8]) texts.push((await completion({ seed, temperature: 1 })).choices[0].text);
    assert.equal(texts[0], texts[1]);
    assert.notEqual(texts[0], texts[2]);
  },
  async twoChoices() {
    const reply = await chat({ n: 2, seed: 3, temperature: 1 });
    assert.equal(new Set(reply.choices.map((choice) => choice.message.content)).size, 2);
  },
  async stopString() {
    const { text } = (await completion()).choices[0];
    const stop = text.slice(8, 12);
    const choice = (await completion({ stop })).choices[0];
    assert.equal(choice.finish_reason, "stop");
    assert.equal(choice.text, text.slice(0, text.indexOf(stop)));
  },
  unknownParameter: () => rejected("temperatur", { temperatur: 1 }),
  wrongValue: () => rejected("temperature", { temperature: 9 }),
  async unknownModel() {
    await assert.rejects(client.completions.create({ model: "nobody", prompt }), NotFoundError);
  },
  async chatLogprobs() {
    const { content } = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
    assert.equal(content.length, (await chat()).usage.completion_tokens);
    assert.ok(content.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2));
  },
  async completionLogprobs() {
    const { text, logprobs } = (await completion({ logprobs: 2 })).choices[0];
    assert.equal(logprobs.tokens.join(""), text);
    assert.equal(logprobs.token_logprobs.length, logprobs.tokens.length);
  },
  async jsonSchema() {
    const response_format = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
    const { content } = (await chat({ max_tokens: 64, response_format })).choices[0].message;
    assert.deepEqual(Object.keys(JSON.parse(content)).sort(), ["age", "name"]);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
  } catch (error) {
    failed += 1;
    console.log(`${name}:\n${error.stack}\n`);
  }
}
const total = Object.keys(checks).length;
console.log(`${VERSION}, ${total - failed} of ${total} checks`);
process.exitCode = failed ? 1 : 0;
