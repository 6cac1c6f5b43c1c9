"use strict";
const {sheet, file, ratings, turns} = JSON.parse(document.getElementById("data").textContent);
const part = id => document.getElementById(id);
const form = part("sheet"), buttons = [...document.querySelectorAll("[data-rating]")];
const columns = Object.keys(turns[0].row), key = `mempipe-ratings-${sheet}`;
let given = turns.map(() => ({})), place = 0, unsaved = false, owner = "", others = {};

// A browser may refuse storage to a file; then the page warns before it is closed with unsaved ratings.
function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(key));
    if (kept?.given?.length !== turns.length) return;
    given = kept.given;
    others = kept.others ?? {};
    form.elements.person.value = owner = kept.person;
    place = firstOpen();
  } catch {}
}

function keep() {
  const person = owner || form.elements.person.value;
  try { localStorage.setItem(key, JSON.stringify({person, given, others})); } catch { unsaved = true; }
}

// Several people may rate in one browser: the ratings of the one before are kept, and are not those of the next.
function rename() {
  const person = form.elements.person.value.trim();
  if (!person || person === owner) return;
  const hasRated = given.some(each => each.comment || ratings.some(name => each[name]));
  const areTheirs = owner && hasRated
    ? confirm(`${owner} has rated turns of this sheet in this browser. Are these the ratings of ${person}?`)
    : !(person in others);
  if (!areTheirs) {
    others[owner] = given;
    given = others[person] ?? turns.map(() => ({}));
    place = firstOpen();
    show(0);
  }
  owner = person;
  keep();
}

function firstOpen() {
  return Math.max(0, given.findIndex(each => !isRated(each)));
}

function isRated(each) {
  return ratings.every(name => each[name]);
}

// Texts become text nodes, whatever they hold. On a small screen the question is above the buttons.
function show(step) {
  place = Math.min(Math.max(place + step, 0), turns.length - 1);
  const {row, memory, truncated} = turns[place];
  const budget = row.budget_tokens && ` of at most ${row.budget_tokens}`;
  part("question").textContent = row.question;
  part("facts").textContent = `right answer: ${row.golden_answers.replaceAll(" | ", " or ")} · turn ${row.turn} of trajectory ${row.trajectory}`;
  part("query").textContent = row.query && `search: ${row.query}`;
  part("text").textContent = row.text_read || "nothing";
  part("text").scrollTop = 0;
  part("before").textContent = row.memory_before || "empty";
  part("before-size").textContent = `${row.memory_before_tokens} tokens`;
  part("after-size").textContent = `${row.memory_after_tokens}${budget} tokens${truncated ? ", cut to its budget" : ""}`;
  const tags = {added: "ins", dropped: "del", kept: "span"};
  const words = memory.flatMap(([kind, text]) => {
    const run = document.createElement(tags[kind]);
    run.textContent = text;
    return [run, " "];
  });
  part("after").replaceChildren(...(row.memory_after ? words : ["empty "].concat(words)));
  part("comment").value = given[place].comment ?? "";
  part("previous").disabled = place === 0;
  part("next").disabled = place === turns.length - 1;
  mark();
  if (part("turn").getBoundingClientRect().top < 0) part("turn").scrollIntoView();
}

function mark() {
  for (const button of buttons)
    button.setAttribute("aria-pressed", String(given[place][button.dataset.rating] === button.dataset.answer));
  const rated = given.filter(isRated).length;
  part("progress").value = rated / turns.length;
  part("count").textContent = `turn ${place + 1} of ${turns.length}, ${rated} rated`;
}

function rate({rating, answer}) {
  given[place][rating] = given[place][rating] === answer ? "" : answer;
  keep();
  mark();
}

// The same columns as the sheet for a spreadsheet, which takes no text for a formula.
function cell(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function csv() {
  const rows = turns.map((turn, number) => ({...turn.row, ...given[number]}));
  return [columns, ...rows.map(row => columns.map(name => row[name]))].map(row => row.map(cell).join(",") + "\r\n").join("");
}

function save() {
  const person = form.elements.person.value.trim().replace(/[^\p{L}\p{N}]+/gu, "-") || "ratings";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv()], {type: "text/csv"}));
  link.download = `${file}-${person}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
  unsaved = false;
}

const keys = {ArrowRight: () => show(1), j: () => show(1), ArrowLeft: () => show(-1), k: () => show(-1)};
buttons.forEach((button, number) => {
  keys[number + 1] = () => rate(button.dataset);
  button.addEventListener("click", () => rate(button.dataset));
});
document.addEventListener("keydown", event => {
  if (event.target.matches("input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
part("previous").addEventListener("click", () => show(-1));
part("next").addEventListener("click", () => show(1));
part("comment").addEventListener("input", event => { given[place].comment = event.target.value; keep(); });
form.addEventListener("input", keep);
form.elements.person.addEventListener("change", rename);
form.addEventListener("submit", event => { event.preventDefault(); save(); });
window.addEventListener("beforeunload", event => { if (unsaved) event.preventDefault(); });
restore();
show(0);
