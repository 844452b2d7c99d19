// Shows the images whose captions or names hold what is typed, of one split or of all.
"use strict";
const wanted = document.getElementById("wanted");
const split = document.getElementById("split");
const figures = [...document.querySelectorAll(".images figure")];
const texts = figures.map((figure) => figure.querySelector("figcaption").textContent.toLowerCase());

function show() {
  const words = wanted.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  figures.forEach((figure, at) => {
    const fits = (!split.value || figure.dataset.split === split.value) && words.every((word) => texts[at].includes(word));
    figure.hidden = !fits;
    count += fits;
  });
  document.getElementById("count").textContent = `${count.toLocaleString("en")} shown`;
}

wanted.addEventListener("input", show);
split.addEventListener("change", show);
wanted.form.addEventListener("submit", (event) => event.preventDefault());
show();
