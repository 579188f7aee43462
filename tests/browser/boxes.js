// What is wrong with the boxes of a page, as sentences: sideways scrolling, cut or broken words, text over text.
(() => {
  const wrong = [], wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) wrong.push("the page scrolls sideways: " + document.documentElement.scrollWidth + " of " + wide);
  const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && !element.closest(".away, .skip, dialog, template");
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "OPTION"].includes(node.parentElement.tagName) || !shown(node.parentElement)) continue;
    for (const word of node.data.matchAll(/[^\s_./\\:=,\-–|]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((box) => box.width > 0.5 && box.height > 0.5);
      const lines = new Set(boxes.map((box) => Math.round(box.top / 4)));
      if (lines.size > 1 && word[0].length <= 24) wrong.push("broken word: " + word[0]);
      for (const box of boxes) {
        if (box.left < -1 || box.right > wide + 1) wrong.push("outside the page: " + word[0]);
        texts.push({ box, word: word[0], owner: node.parentElement });
      }
    }
  }
  for (const element of document.querySelectorAll("body *")) {
    if (!shown(element) || element.closest("svg")) continue;
    const style = getComputedStyle(element);
    if (style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1 && !["INPUT", "SELECT", "TEXTAREA"].includes(element.tagName)) wrong.push("cut: " + element.tagName + "." + element.className + " " + element.scrollWidth + " of " + element.clientWidth);
  }
  const solid = [...document.querySelectorAll("button, input, select, textarea, progress, .plot")].filter(shown);
  for (const element of solid) texts.push({ box: element.getBoundingClientRect(), word: element.tagName + "#" + element.id, owner: element });
  texts.sort((a, b) => a.box.top - b.box.top);
  texts.forEach((one, k) => {
    for (let at = k + 1; at < texts.length && texts[at].box.top < one.box.bottom - 2; at++) {
      const two = texts[at];
      if (one.owner === two.owner || one.owner.contains(two.owner) || two.owner.contains(one.owner)) continue;
      const across = Math.min(one.box.right, two.box.right) - Math.max(one.box.left, two.box.left);
      const down = Math.min(one.box.bottom, two.box.bottom) - two.box.top;
      if (across > 2 && down > 4) wrong.push(one.word + " covers " + two.word);
    }
  });
  return [...new Set(wrong)].slice(0, 12);
})()
