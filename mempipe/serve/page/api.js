// The page of the API: the service's OpenAPI schema as text.
"use strict";

const LIMITS = {
  minimum: ["at least", ""], maximum: ["at most", ""],
  exclusiveMinimum: ["more than", ""], exclusiveMaximum: ["less than", ""],
  minLength: ["at least", " characters"], maxLength: ["at most", " characters"],
  minItems: ["at least", " items"], maxItems: ["at most", " items"],
};

function make(tag, content, attributes) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...[content ?? []].flat());
  return node;
}

// Text whose lines were broken to fit a source file; empty lines stay.
function unwrapped(text) {
  return text.replace(/(?<!\n)\n(?!\n)/g, " ");
}

function nameOf(reference) {
  return reference.split("/").pop();
}

// What a schema takes, as text and links to objects.
function kind(schema) {
  if (schema.$ref) return [make("a", nameOf(schema.$ref), { href: `#${nameOf(schema.$ref)}` })];
  if (schema.allOf) return schema.allOf.flatMap(kind);
  if (schema.anyOf) return schema.anyOf.flatMap((each, i) => (i ? [" or ", ...kind(each)] : kind(each)));
  if (schema.type === "array") return ["list of ", ...kind(schema.items), ...limits(schema)];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  return [schema.type ?? "any value", ...limits(schema)];
}

function limits(schema) {
  const set = Object.entries(LIMITS).filter(([name]) => name in schema);
  return set.map(([name, [before, after]]) => `, ${before} ${schema[name]}${after}`);
}

function row(name, schema, isNeeded) {
  const hasValue = !("const" in schema) && ["number", "string", "boolean"].includes(typeof schema.default);
  const value = hasValue ? `; by default ${JSON.stringify(schema.default)}` : "";
  const line = [make("code", name), " ", ...kind(schema), value, isNeeded ? " (required)" : ""];
  const meaning = schema.description ? [make("p", unwrapped(schema.description), { className: "quiet" })] : [];
  return make("li", [...line, ...meaning]);
}

function bodies(title, content) {
  return Object.entries(content ?? {}).map(([type, { schema }]) =>
    make("p", [`${title} ${type}: `, ...kind(schema ?? {})]),
  );
}

function route(path, method, operation) {
  const parameters = (operation.parameters ?? []).map((each) =>
    row(each.name, { ...each.schema, description: each.description ?? each.schema.description }, each.required),
  );
  const replies = Object.entries(operation.responses).map(([status, reply]) =>
    make("li", [make("code", status), ` ${reply.description}`, ...bodies("", reply.content)]),
  );
  return make("article", [
    make("h2", `${method.toUpperCase()} ${path}`),
    make("p", unwrapped(operation.description ?? operation.summary ?? "")),
    ...(parameters.length ? [make("ul", parameters)] : []),
    ...bodies("takes", operation.requestBody?.content),
    make("details", [make("summary", "replies"), make("ul", replies)]),
  ], { className: "turn" });
}

function object(name, schema) {
  const needed = schema.required ?? [];
  const fields = Object.entries(schema.properties ?? {}).map(([field, each]) =>
    row(field, each, needed.includes(field)),
  );
  const meaning = make("p", unwrapped(schema.description ?? ""));
  return make("article", [make("h3", name), meaning, make("ul", fields)], { id: name, className: "turn" });
}

async function show() {
  const schema = await (await fetch("openapi.json")).json();
  for (const [path, methods] of Object.entries(schema.paths))
    for (const [method, operation] of Object.entries(methods))
      document.getElementById("routes").append(route(path, method, operation));
  for (const [name, each] of Object.entries(schema.components.schemas))
    document.getElementById("objects").append(object(name, each));
}

show().catch((error) => document.getElementById("routes").append(error.message));
