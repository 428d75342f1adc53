// A field for a message as it was printed, values and all; links to the messages that it may be. Nothing leaves the page.
"use strict";

const field = document.createElement("textarea");
const found = document.createElement("ul");

// What a message says between the values, which stand in capitals.
function parts(text) {
  return text.split(/(?<![A-Za-z])[A-Z][A-Z-]+(?![a-z])|…/);
}

// Whether all of that is in a line, in its order: the first place of each leaves the most room for the next.
function fits(text, line) {
  let at = 0;
  return parts(text).every((part) => {
    const there = line.indexOf(part, at);
    at = there + part.length + 1;
    return there >= 0;
  });
}

function words(text) {
  return parts(text).join("").length;
}

function find() {
  const line = field.value.replace(/\s+/g, " ");
  const likely = messages.filter(([text]) => words(text) > 5 && fits(text, line));
  likely.sort(([one], [other]) => words(other) - words(one));
  found.replaceChildren(
    ...likely.slice(0, 5).map(([text, target]) => {
      const link = document.createElement("a");
      link.href = target;
      link.textContent = text;
      const item = document.createElement("li");
      item.append(link);
      return item;
    }),
  );
  if (line.trim() && !likely.length) found.textContent = "None of the messages below is in that.";
}

addEventListener("DOMContentLoaded", () => {
  const place = document.createElement("div");
  place.id = "find";
  field.rows = 3;
  field.placeholder = "Paste what was printed";
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", find);
  place.append(field, found);
  document.querySelector("article h1").after(place);
});
