"use strict";
(() => {
  const root = document.documentElement;
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  root.classList.add("script");

  // colours: automatic, light, dark; remembered where the browser lets a local page remember
  const themes = ["automatic", "light", "dark"];
  const remember = (value) => { try { localStorage.setItem("visacc-theme", value); } catch { /* not allowed here */ } };
  const recall = () => { try { return localStorage.getItem("visacc-theme"); } catch { return null; } };
  const button = one("#theme");
  const paint = (theme) => {
    if (theme === "automatic") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = `colours: ${theme}`;
  };
  let theme = themes.includes(recall()) ? recall() : "automatic";
  paint(theme);
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    remember(theme);
    paint(theme);
  });

  const shotOf = (item, method) => one(`.shot[data-method="${method}"]`, item);
  const items = all(".item");

  // pictures: side by side, or two methods under a movable divider
  const pictures = one("#pictures");
  if (pictures) {
    const left = one("#left"), right = one("#right"), wipe = one("#wipe"), heat = one("#heat");
    if (right.options.length > 1) right.selectedIndex = 1;
    const layer = (shot, name) => {
      const box = document.createElement("div");
      box.className = name;
      for (const image of all("img", shot)) box.append(image.cloneNode());
      return box;
    };
    const side = (shot, method) => {
      const box = document.createElement("div");
      box.append(...(shot ? one("figcaption", shot).cloneNode(true).childNodes : [`no picture of ${method}`]));
      return box;
    };
    const move = (compare, value) => {
      compare.style.setProperty("--wipe", `${value}%`);
      const input = one("input", compare);
      if (input) input.value = value;
    };
    const build = () => {
      for (const item of items) {
        const compare = one(".compare", item);
        const pair = [left, right].map((select) => shotOf(item, select.value));
        const names = [left, right].map((select) => select.selectedOptions[0].textContent);
        const frame = document.createElement("div");
        frame.className = "frame";
        if (pair[0]) frame.append(layer(pair[0], "under"));
        if (pair[1]) frame.append(layer(pair[1], "over"));
        const rule = document.createElement("div");
        rule.className = "rule";
        const input = document.createElement("input");
        Object.assign(input, { type: "range", min: 0, max: 100 });
        input.setAttribute("aria-label", `divider between ${names[0]} and ${names[1]}`);
        input.addEventListener("input", () => move(compare, input.value));
        frame.append(rule, input);
        const sides = document.createElement("div");
        sides.className = "sides";
        sides.append(side(pair[0], names[0]), side(pair[1], names[1]));
        compare.replaceChildren(frame, sides);
        move(compare, wipe.value);
      }
    };
    const show = (view) => {
      pictures.dataset.view = view;
      for (const b of all("[data-view]", one(".controls", pictures))) {
        b.setAttribute("aria-pressed", String(b.dataset.view === view));
      }
      if (view === "slider") build();
      for (const item of items) one(".compare", item).hidden = view !== "slider";
    };
    for (const b of all("button[data-view]", pictures)) b.addEventListener("click", () => show(b.dataset.view));
    for (const select of [left, right]) select.addEventListener("change", build);
    const moveAll = (value) => { wipe.value = value; for (const c of all(".compare", pictures)) move(c, value); };
    wipe.addEventListener("input", () => moveAll(wipe.value));
    one("#flip").addEventListener("click", () => moveAll(Number(wipe.value) >= 50 ? 0 : 100));
    if (heat) heat.addEventListener("change", () => pictures.classList.toggle("show-heat", heat.checked));
    show("strip");
  }

  // commit order: the mean map or that of one picture, over the picture
  const order = one("#order");
  if (order) {
    const which = one("#which"), opacity = one("#opacity");
    const put = (image, source) => { if (source) image.src = source; else image.removeAttribute("src"); };
    const fill = () => {
      const chosen = which && which.value !== "mean" ? items[Number(which.value)] : null;
      for (const figure of all(".order", order)) {
        const map = one(".heat", figure), picture = one(".picture", figure);
        const shot = items.length ? shotOf(chosen || items[0], figure.dataset.method) : null;
        const own = chosen && shot ? one(".heat", shot) : null;
        put(map, chosen ? own && own.src : map.dataset.mean);
        one(".last", figure).textContent = chosen ? (own ? own.dataset.last : "not kept") : map.dataset.last;
        if (picture) put(picture, shot && one(".picture", shot).src);
      }
    };
    if (which) which.addEventListener("change", fill);
    opacity.addEventListener("input", () => order.style.setProperty("--map", opacity.value / 100));
    fill();
  }
})();
