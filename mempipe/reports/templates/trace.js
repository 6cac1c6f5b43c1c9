"use strict";
const {trajectories, passages} = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters"), list = document.getElementById("list");
const detail = document.getElementById("detail"), count = document.getElementById("count");
let shown = [], current = null;

// Texts become text nodes, whatever they hold.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null));
  return made;
}

function fill(name, values) {
  const known = [...new Set(values)].sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(b));
  form.elements[name].append(element("option", {value: ""}, "all"), ...known.map(
    value => element("option", {value: String(value)}, value === null ? "none" : String(value))));
  form.elements[name].parentElement.hidden = known.length < 2;
}

function fits(each) {
  const wish = Object.fromEntries(new FormData(form));
  const text = wish.text.toLowerCase();
  return (each.question.toLowerCase().includes(text) || each.questionId.toLowerCase().includes(text))
    && (!wish.phase || each.phase === wish.phase)
    && (!wish.outcome || each.right === (wish.outcome === "right"))
    && (!wish.end || each.end === wish.end)
    && (!wish.budget || String(each.budget) === wish.budget)
    && (!wish.hops || String(each.hops) === wish.hops)
    && (wish.low === "" || each.reward >= Number(wish.low))
    && (wish.high === "" || each.reward <= Number(wish.high))
    && (!wish.lost || each.lost);
}

function filter() {
  shown = trajectories.filter(fits);
  count.textContent = `${shown.length} of ${trajectories.length} trajectories`;
  list.replaceChildren(...shown.map(item));
  select(shown.includes(current) ? current : shown[0] ?? null);
}

function item(each) {
  const mark = element("span", {class: each.right ? "right" : "wrong"}, each.right ? "✓ " : "✗ ");
  const facts = [each.phase, each.end, counted(each.turns.at(-1)?.last ?? 0), `reward ${each.reward.toFixed(2)}`, each.lost ? "lost a fact" : ""];
  const button = element("button", {type: "button"}, element("span", {class: "question"}, mark, each.question), element("small", {}, facts.filter(Boolean).join(" · ")));
  button.addEventListener("click", () => select(each));
  return element("li", {}, button);
}

function select(each) {
  current = each;
  [...list.children].forEach((row, index) => {
    const isCurrent = shown[index] === each;
    row.firstChild.setAttribute("aria-current", String(isCurrent));
    if (isCurrent) row.scrollIntoView({block: "nearest"});
  });
  detail.replaceChildren(...(each ? page(each) : [element("p", {class: "facts"}, "No trajectory fits.")]));
  if (each) history.replaceState(null, "", "#" + encodeURIComponent(each.id));
}

function page(each) {
  const facts = [`right answer: ${each.golden}`, each.phase, each.hops > 1 ? `${each.hops} hops` : "",
    each.budget === null ? "" : `memory of at most ${each.budget} tokens`, each.id];
  const answer = each.answer === null ? `no answer: ${each.end}` : each.answer;
  return [element("h2", {}, each.question), element("p", {class: "facts"}, ...apart(facts.filter(Boolean))),
    ...each.turns.map(turn => turnPart(each, turn)),
    element("p", {class: `outcome ${each.right ? "right" : "wrong"}`}, `${each.right ? "✓" : "✗"} ${answer}`,
      element("span", {}, `${each.verdict.includes("of") ? `${each.verdict}, ` : ""}reward ${each.reward.toFixed(3)}, ended by ${each.end}`))];
}

// Arabic in one of the texts moves nothing of the next.
function apart(texts) {
  return texts.flatMap((text, number) => [number ? " · " : "", element("bdi", {}, text)]);
}

function counted(turns) {
  return `${turns} turn${turns === 1 ? "" : "s"}`;
}

function turnPart(each, turn) {
  const tokens = Object.entries(turn.tokens).map(([name, number]) => element("span", {}, `${name} ${number.toLocaleString("en")}`));
  const parts = [element("div", {class: "turn-head"}, turn.first === turn.last ? `Turn ${turn.first}` : `Turns ${turn.first} to ${turn.last}`, element("span", {class: "tokens"}, ...tokens))];
  for (const step of turn.steps) {
    if (step.thought) parts.push(element("p", {class: "thought"}, step.thought));
    for (const search of step.searches) {
      parts.push(element("p", {class: "query"}, element("span", {}, "search"), " " + search.query));
      parts.push(texts(search.passages));
    }
  }
  if (turn.chunk) parts.push(texts([turn.chunk]));
  for (const use of turn.tools) parts.push(element("p", {class: "query"}, element("span", {}, use.tool), " " + use.arguments),
    ...use.texts.map(text => element("pre", {}, text)));
  if (turn.wrote) parts.push(memory(turn));
  each.factsOf.forEach((places, objective) => places.length && parts.push(element("div", {},
    each.factsOf.length > 1 ? `question ${objective + 1}: ` : null, ...places.map(
      place => element("span", {class: `fact ${turn.facts[place]}`}, `${each.facts[place]}: ${turn.facts[place]}`)))));
  parts.push(element("details", {}, element("summary", {}, "the whole message"), element("pre", {}, turn.message)));
  return element("div", {class: "turn"}, ...parts);
}

function texts(read) {
  return element("ul", {class: "passages"}, ...read.map(([number, needed]) => element("li", {},
    needed ? element("b", {class: "needed", title: "the question needs it"}, "● ") : null,
    element("b", {}, passages[number].title), " " + passages[number].text)));
}

function memory(turn) {
  const tags = {added: "ins", dropped: "del", kept: "span"};
  const words = turn.memory.map(([kind, text]) => [element(tags[kind], {}, text), " "]).flat();
  if (!words.length) words.push(element("span", {class: "nothing"}, "empty"));
  return element("div", {class: "memory"},
    element("span", {class: "memory-head"}, turn.truncated ? "memory, cut to its budget: " : "memory: "), ...words);
}

function move(step) {
  const place = shown.indexOf(current) + step;
  if (place >= 0 && place < shown.length) select(shown[place]);
}

function otherPhase() {
  const same = trajectories.filter(each => each.questionId === current?.questionId);
  const next = same[(same.indexOf(current) + 1) % same.length];
  if (!next || next === current) return;
  if (!shown.includes(next)) { form.reset(); filter(); }
  select(next);
}

const keys = {j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), c: otherPhase,
  "/": () => form.elements.text.focus()};
document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, select");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));

fill("phase", trajectories.map(each => each.phase));
fill("outcome", trajectories.map(each => each.right ? "right" : "wrong"));
fill("end", trajectories.map(each => each.end));
fill("budget", trajectories.map(each => each.budget));
fill("hops", trajectories.map(each => each.hops));
const wanted = decodeURIComponent(location.hash.slice(1));
// Without a wish it opens on what training has made of the agent, not on the first failure before it.
current = trajectories.find(each => each.id === wanted) ?? trajectories.find(each => each.phase === "after") ?? null;
filter();
