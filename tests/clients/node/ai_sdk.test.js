// The AI SDK with its provider for servers that speak OpenAI's API.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { ANSWER, GENERATING, Person, POOLING, QUESTION, Topic } from "./forms.js";

const provider = createOpenAICompatible({
  name: "shardline",
  baseURL: GENERATING,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider("demo"), prompt: QUESTION, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

test("text", async () => {
  const whole = await generateText(asked);
  assert.match(whole.text, ANSWER);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText(asked);
  const deltas = [];
  for await (const delta of stream.textStream) deltas.push(delta);
  assert.ok(deltas.length > 3);
  assert.equal(deltas.join(""), whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

test("an object", async () => {
  const output = Output.object({ schema: Person });
  const whole = await generateText({ ...asked, output });
  Person.parse(whole.output);
  const stream = streamText({ ...asked, output });
  let partial;
  for await (partial of stream.partialOutputStream);
  assert.deepEqual(partial, whole.output);
});

test("tools", async () => {
  const topics = [];
  const find = tool({
    description: "Find a module by what it does.",
    inputSchema: Topic,
    execute: async ({ topic }) => topics.push(topic) && "os.path",
  });
  const calling = { ...asked, tools: { find_module: find }, toolChoice: "required" };
  const whole = await generateText({ ...calling, stopWhen: isStepCount(2) });
  assert.equal(whole.steps.length, 2);
  assert.equal(whole.steps[0].toolCalls[0].toolName, "find_module");
  assert.equal(typeof topics[0], "string");
  const stream = streamText({ ...calling, stopWhen: isStepCount(1) });
  await stream.consumeStream();
  assert.deepEqual((await stream.toolCalls)[0].input, whole.steps[0].toolCalls[0].input);
});

test("a completion", async () => {
  const model = provider.completionModel("demo");
  const answer = await generateText({ ...asked, model, prompt: "os.path.join:", maxOutputTokens: 12 });
  assert.ok(answer.text);
});

test("errors have the client's types", async () => {
  await assert.rejects(generateText({ ...asked, temperature: -1 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.match(error.message, /temperature/);
    return true;
  });
});

test("embeddings", async () => {
  const model = createOpenAICompatible({ name: "shardline", baseURL: POOLING }).textEmbeddingModel("demo");
  const { embeddings, usage } = await embedMany({ model, values: ["os.path", "json"] });
  assert.equal(embeddings.length, 2);
  assert.ok(usage.tokens > 0);
});
