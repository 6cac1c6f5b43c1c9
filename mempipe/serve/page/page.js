// The page of the agent service: asks with server-sent events and shows each turn when it is told.
"use strict";

const at = (id) => document.getElementById(id);
let trace = null; // the last answer, for download
let session = null;
let corpus = { partition: "", partitions: [], examples: [] };
let asking = null; // the AbortController of the question under way

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

async function loadModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    at("model").textContent = response.status === 401 ? "give an API key under Options" : await refusal(response);
    return;
  }
  const model = (await response.json()).data[0];
  at("model").textContent = `${model.id}, weights ${model.version}`;
  at("agent").replaceChildren(...model.agents.map((name) => make("option", name)));
  await loadCorpus();
}

async function loadCorpus() {
  const response = await fetch("v1/corpus", { headers: headers() });
  if (!response.ok) return;
  corpus = await response.json();
  at("partition_label").hidden = corpus.partition === "" && corpus.partitions.length === 0;
  at("partition").placeholder = corpus.partition || "all of it";
  at("partitions").replaceChildren(...corpus.partitions.map((name) => make("option", name)));
  at("examples").hidden = corpus.examples.length === 0;
  at("example_list").replaceChildren(...corpus.examples.map(exampleItem));
}

function exampleItem(example) {
  const button = make("button", example.question);
  button.type = "button";
  button.addEventListener("click", () => {
    at("question").value = example.question;
    at("partition").value = example.partition === corpus.partition ? "" : example.partition;
    at("text").value = example.text;
    ask();
  });
  const item = make("li");
  item.append(button);
  return item;
}

function asksExample(asked, example) {
  const partition = asked.partition ?? corpus.partition;
  return (
    asked.question.trim() === example.question &&
    partition === example.partition &&
    (asked.text ?? "") === example.text &&
    asked.session === undefined
  );
}

function request() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const budget = { memory_tokens: number("memory_tokens"), max_turns: number("max_turns") };
  return {
    question: at("question").value,
    text: at("text").value.trim() ? at("text").value : undefined,
    agent: at("agent").value || undefined,
    budget,
    partition: at("partition").value.trim() || undefined,
    sampling: { temperature: number("temperature") },
    num_samples: number("num_samples"),
    session: session ?? undefined,
    stream: true,
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const name = /^event: (.*)$/m.exec(block);
      const data = /^data: (.*)$/m.exec(block);
      if (name && data) yield [name[1], JSON.parse(data[1])];
    }
  }
}

async function ask() {
  if (asking) return;
  asking = new AbortController();
  clear();
  at("ask").disabled = true;
  at("stop").hidden = false;
  say("working …");
  try {
    if (!at("keep").checked) session = null;
    else if (session === null) session = await newSession();
    const asked = request();
    const body = JSON.stringify(asked);
    const response = await fetch("v1/answer", { method: "POST", headers: headers(), body, signal: asking.signal });
    if (!response.ok) {
      if (response.status === 404) session = null; // it has expired, or belongs to another key
      throw new Error(await refusal(response));
    }
    await show(events(response));
    const example = corpus.examples.find((each) => asksExample(asked, each));
    at("expected").hidden = !example;
    if (example) at("expected").textContent = `right answer: ${example.golden_answers.join(" or ")}`;
  } catch (error) {
    fail(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    asking = null;
    at("ask").disabled = false;
    at("stop").hidden = true;
  }
}

async function newSession() {
  const response = await fetch("v1/sessions", { method: "POST", headers: headers() });
  if (!response.ok) throw new Error(await refusal(response));
  return (await response.json()).id;
}

async function show(stream) {
  const turns = [];
  for await (const [name, data] of stream) {
    if (data.sample) continue; // of several attempts the first is watched
    if (name === "search") say(`turn ${data.turn + 1}: searching for “${data.query}” …`);
    else if (name === "message") say(`turn ${data.turn + 1}: ${data.thought || "working …"}`);
    else if (name === "turn") {
      turns.push(data);
      at("turns").append(turnCard(data));
      draw(turns);
    } else if (name === "restarted") {
      turns.length = 0;
      at("turns").replaceChildren();
      say("the index changed; the agent starts again …");
    } else if (name === "answer") return finish(data);
    else if (name === "error") throw new Error(data.error.message);
  }
  throw new Error("the connection ended before the answer");
}

function clear() {
  trace = null;
  at("turns").replaceChildren();
  at("chart_section").hidden = true;
  at("save").hidden = true;
  at("answer").hidden = false;
  at("answer").classList.remove("failed");
  at("expected").hidden = true;
  for (const id of ["text_answer", "numbers", "status"]) at(id).textContent = "";
}

function say(text) {
  at("status").textContent = text;
}

function fail(message) {
  at("answer").classList.add("failed");
  at("status").textContent = "";
  at("text_answer").textContent = message;
}

function finish(answer) {
  trace = answer;
  at("turns").replaceChildren(...answer.turns.map(turnCard));
  draw(answer.turns);
  at("answer").hidden = false;
  at("status").textContent = answer.question;
  at("text_answer").textContent = answer.answer === null ? `no answer (${answer.end_reason.replaceAll("_", " ")})` : answer.answer;
  const parts = [
    `${answer.turns.length} turn${answer.turns.length === 1 ? "" : "s"}`,
    `${answer.usage.total_tokens} tokens`,
    `${answer.seconds.toFixed(2)} s`,
    `${answer.model}, weights ${answer.model_version}`,
  ];
  if (answer.confidence !== null) parts.unshift(`confidence ${Math.round(100 * answer.confidence)} %`);
  at("numbers").textContent = parts.join(" · ");
  at("save").hidden = false;
}

function turnCard(turn) {
  const card = make("li", undefined, "turn");
  const title = make("h3", `Turn ${turn.index + 1}`);
  title.append(make("span", `${turn.prompt_tokens} tokens in the prompt, ${turn.sampled_tokens} written`, "quiet"));
  card.append(title);
  const line = (name, ...content) => {
    const text = make("p");
    text.append(make("span", `${name} `, "name"), ...content);
    card.append(text);
  };
  const folded = (name, ...content) => {
    const text = make("details");
    text.append(make("summary", name), ...content);
    card.append(text);
  };
  if (turn.chunk) folded("the part of the text that it read", make("p", turn.chunk));
  if (turn.thought) line("thought", turn.thought);
  for (const search of turn.searches) {
    line("search", search.query);
    if (!search.passages.length) continue;
    const passages = search.passages.map((passage) => {
      const text = make("p");
      text.append(make("strong", passage.title), ` ${passage.text}`);
      return text;
    });
    folded(`${passages.length} passages`, ...passages);
  }
  for (const use of turn.tools) line(use.tool, use.texts.join("\n"));
  const marks = [
    ...turn.memory_added.map((text) => make("ins", text)),
    ...turn.memory_dropped.map((text) => make("del", text)),
  ];
  if (marks.length) line("memory", ...marks.flatMap((mark) => [mark, " "]));
  const whole = [turn.action];
  if (turn.memory_before) whole.push(`memory before: ${turn.memory_before}`);
  if (turn.memory_after) whole.push(`memory after: ${turn.memory_after}`);
  folded("as it was written", ...whole.map((text) => make("p", text)));
  return card;
}

function draw(turns) {
  at("chart_section").hidden = false;
  const [width, height, left, bottom] = [Math.max(at("chart").clientWidth, 240), 200, 44, 24];
  const most = Math.max(...turns.flatMap((turn) => [turn.prompt_tokens, turn.full_history_tokens]), 1);
  const step = (width - left) / turns.length;
  const y = (tokens) => (height - bottom) * (1 - tokens / most) + 8;
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const zero = y(0);
  const shapes = [
    svg("line", { class: "axis", x1: left, x2: width, y1: zero, y2: zero }),
    svg("text", { x: left - 6, y: y(most) + 4, "text-anchor": "end" }, most),
    svg("text", { x: left - 6, y: zero + 4, "text-anchor": "end" }, 0),
  ];
  const middle = (i) => left + step * (i + 0.5);
  const bar = Math.min(step * 0.6, 48);
  turns.forEach((turn, i) => {
    const top = y(turn.prompt_tokens);
    shapes.push(svg("rect", { class: "bounded", x: middle(i) - bar / 2, y: top, width: bar, height: zero - top, rx: 2 }));
    if (turns.length <= 24) shapes.push(svg("text", { x: middle(i), y: zero + 18, "text-anchor": "middle" }, i + 1));
  });
  const points = turns.map((turn, i) => `${middle(i)},${y(turn.full_history_tokens)}`);
  shapes.push(svg("polyline", { class: "full", points: points.join(" ") }));
  turns.forEach((turn, i) =>
    shapes.push(svg("circle", { class: "dot", cx: middle(i), cy: y(turn.full_history_tokens), r: 3 })),
  );
  const chart = at("chart");
  chart.setAttribute("viewBox", `0 0 ${width} ${height + 8}`);
  const last = turns[turns.length - 1];
  const label = `turn ${turns.length}: ${last.prompt_tokens} tokens, with the full history ${last.full_history_tokens}`;
  chart.setAttribute("aria-label", label);
  chart.replaceChildren(...shapes);
}

function save() {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(trace, null, 1)], { type: "application/json" }));
  link.download = `trace-${trace.id}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function open() {
  const [file] = at("open").files;
  if (!file) return;
  clear();
  try {
    finish(JSON.parse(await file.text()));
  } catch {
    fail("this file holds no trace");
  }
  at("open").value = "";
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => asking?.abort());
at("save").addEventListener("click", save);
at("open").addEventListener("change", open);
at("key").addEventListener("change", loadModel);
at("keep").addEventListener("change", () => {
  session = null;
});
loadModel().catch((error) => {
  at("model").textContent = error.message;
});
