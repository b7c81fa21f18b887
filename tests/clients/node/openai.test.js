// The official client for JavaScript.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ANSWER, GENERATING, Person, POOLING, QUESTION, Topic } from "./forms.js";

const client = new OpenAI({ baseURL: GENERATING, apiKey: "none", maxRetries: 0 });
const asked = { model: "demo", temperature: 0, max_tokens: 200, messages: [{ role: "user", content: QUESTION }] };
const askedResponse = { model: "demo", temperature: 0, max_output_tokens: 200, input: QUESTION };

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, ["demo"]);
});

test("chat", async () => {
  const whole = await client.chat.completions.create(asked);
  assert.match(whole.choices[0].message.content, ANSWER);
  const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

test("chat with a schema", async () => {
  const answer = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Person, "person") });
  Person.parse(answer.choices[0].message.parsed);
});

test("chat that runs a tool", async () => {
  const topics = [];
  const tool = zodFunction({
    name: "find_module",
    description: "Find a module by what it does.",
    parameters: Topic,
    function: ({ topic }) => topics.push(topic) && "os.path",
  });
  const runner = client.chat.completions.runTools(
    { ...asked, tools: [tool], tool_choice: "required", parallel_tool_calls: false },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.equal(typeof topics[0], "string");
  assert.deepEqual(
    runner.messages.slice(0, 3).map((message) => message.role),
    ["user", "assistant", "tool"],
  );
});

test("responses", async () => {
  const whole = await client.responses.create(askedResponse);
  assert.match(whole.output_text, ANSWER);
  const final = await client.responses.stream(askedResponse).finalResponse();
  assert.equal(final.output_text, whole.output_text);
  const parsed = await client.responses.parse({ ...askedResponse, text: { format: zodTextFormat(Person, "person") } });
  Person.parse(parsed.output_parsed);
});

test("errors have the client's types", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
});

test("embeddings", async () => {
  const pooling = new OpenAI({ baseURL: POOLING, apiKey: "none", maxRetries: 0 });
  // The client asks for base64 and decodes it.
  const answer = await pooling.embeddings.create({ model: "demo", input: ["os.path", "json"] });
  const floats = await pooling.embeddings.create({ model: "demo", input: "json", encoding_format: "float" });
  assert.equal(answer.data.length, 2);
  for (const [index, value] of floats.data[0].embedding.entries()) {
    assert.ok(Math.abs(value - answer.data[1].embedding[index]) < 1e-6);
  }
});
