// An agent with one tool, which knows OPENAI_BASE_URL and OPENAI_API_KEY only. Prints its last answer.
const OpenAI = require("openai");

const tools = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Adds.",
      parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
    },
  },
];

async function main() {
  const client = new OpenAI({ maxRetries: 0 });
  const messages = [{ role: "user", content: "1 + 2?" }];
  for (;;) {
    const answer = await client.chat.completions.create({ model: "any", messages, tools });
    const message = answer.choices[0].message;
    messages.push(message);
    if (!message.tool_calls) break;
    for (const call of message.tool_calls) {
      const { a, b } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
    }
  }
  messages.push({ role: "user", content: "thanks" });
  const stream = await client.chat.completions.create({ model: "any", messages, tools, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  console.log(text);
}

main();
