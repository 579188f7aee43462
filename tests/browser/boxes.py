"""Layout checks in Chromium: text that overlaps, is truncated, or is outside the window."""

from __future__ import annotations

from devtools import Browser

FAULTS = r"""(() => {
  const faults = [], boxes = [], range = document.createRange();
  const moves = (element) => ['auto', 'scroll'].includes(getComputedStyle(element).overflowX);
  const wider = (element) => element.scrollWidth > element.clientWidth + 1;
  const inside = (element) => element && ((moves(element) && wider(element)) || inside(element.parentElement));
  const seen = (element) => !element.closest('.away, .skip, script, style') && element.checkVisibility();
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) faults.push(`the page scrolls sideways: ${wide} > ${innerWidth}`);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const own = node.parentElement;
    if (!node.data.trim() || !seen(own)) continue;
    const upright = getComputedStyle(own).writingMode !== 'horizontal-tb', framed = inside(own);
    for (const found of node.data.matchAll(/(?<!\S)--\w+|[^\s-]+/g)) {
      const word = found[0];
      range.setStart(node, found.index);
      range.setEnd(node, found.index + word.length);
      const parts = [...range.getClientRects()].filter((r) => r.width > 0.5);
      if (parts.length > 1 && word.length <= 24 && !upright && !own.closest('pre')) faults.push(`cut word: ${word}`);
      for (const r of parts) {
        if (framed) continue;
        if (r.left < -0.5 || r.right > innerWidth + 0.5) faults.push(`outside: ${word} ${r.left} to ${r.right}`);
        boxes.push([r.left, r.top, r.right, r.bottom, node, word]);
      }
    }
  }
  for (const element of document.querySelectorAll('body *')) {
    if (!seen(element) || !wider(element)) continue;
    const sizes = `${element.scrollWidth} > ${element.clientWidth}`;
    if (getComputedStyle(element).overflowX === 'hidden') faults.push(`hidden: ${element.className} ${sizes}`);
    if (moves(element) && !element.querySelector(MAY_SCROLL))
      faults.push(`does not fit: ${element.getAttribute('aria-label')} ${sizes}`);
  }
  boxes.sort((a, b) => a[1] - b[1]);
  boxes.forEach((a, k) => {
    for (let j = k + 1; j < boxes.length && boxes[j][1] < a[3] - 5; j++) {
      const b = boxes[j], across = Math.min(a[2], b[2]) - Math.max(a[0], b[0]), down = Math.min(a[3], b[3]) - b[1];
      if (b[4] !== a[4] && across > 1.5 && down > 5) faults.push(`${a[5]} lies on ${b[5]}`);
    }
  });
  return faults.slice(0, 12);
})()"""
LOOKS = [(width, dark) for width in (390, 1400) for dark in (False, True)]


def page_faults(browser: Browser, *, may_scroll: str = ".no-table") -> list[str]:
    """Return layout faults at the current width; tables that match `may_scroll` may be wider than their frame."""
    return list(browser.run(FAULTS.replace("MAY_SCROLL", repr(may_scroll))))


def unfold_all(browser: Browser) -> None:
    """Open all collapsed sections of the page."""
    browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
