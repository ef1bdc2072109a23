"""What is tried with Vercel's AI SDK, in JavaScript. A row finds `load`, which imports a package."""

from __future__ import annotations

from benchmarks.clients.feature import CALLS, GUIDED, LOOP, NODE, Client, Feature

_VERCEL = """
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");
const provider = createOpenAICompatible({
    name: "ampd", baseURL: `${URL}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const inputSchema = z.object({ a: z.number().int(), b: z.number().int() });
const add = tool({ description: "Add two numbers.", inputSchema, execute: async ({ a, b }) => a + b });
const usual = {
    model: provider("tiny"), headers: { "x-dynamo-session-id": SESSION }, maxRetries: 0, maxOutputTokens: 200,
    prompt: "Add", stopWhen: stepCountIs(5),
};
const check = (fits, found) => { if (!fits) throw new Error(JSON.stringify(found)); };
"""

VERCEL = Client(
    "Vercel AI SDK",
    "ai",
    _VERCEL,
    (
        Feature(
            "tool loop, 3 rounds with 2 parallel calls",
            "const done = await generateText({ ...usual, tools: { add } });\n"
            "check(done.text.trim() === 'It is 10.' && done.steps.length === 3, done.steps);",
            replies=LOOP,
        ),
        Feature(
            "the same, streamed",
            "const done = streamText({ ...usual, tools: { add } });\n"
            "let text = '';\n"
            "for await (const part of done.textStream) text += part;\n"
            "check(text.endsWith('It is 10.') && (await done.steps).length === 3, text);",
            replies=LOOP,
        ),
        Feature(
            "`generateObject`",
            "const schema = z.object({ city: z.enum(['Oslo', 'Rome']), is_far: z.boolean() });\n"
            "const done = await generateObject({ ...usual, schema });\n"
            "check(['Oslo', 'Rome'].includes(done.object.city), done.object);",
            "400 on the modelled engine",
            guided=GUIDED,
        ),
        Feature(
            "`toolChoice: 'required'`",
            "const forced = { tools: { add }, toolChoice: 'required', stopWhen: stepCountIs(1) };\n"
            "const done = await generateText({ ...usual, ...forced });\n"
            "check(done.toolCalls.length > 0, done.content);",
            "500 on the modelled engine",
            guided=CALLS[0],
        ),
    ),
    NODE,
)
