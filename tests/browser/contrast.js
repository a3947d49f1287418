// every text on the page whose colour is too near to its background's, by WCAG 2.2 level AA
() => {
  const part = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const numbers = (text) => text.match(/[\d.]+/g).map(Number);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const c = numbers(getComputedStyle(one).backgroundColor);
      if (c.length < 4 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility()) continue;
    if (one.closest("option, noscript, [disabled], [aria-pressed=false], .skip")) continue;
    const style = getComputedStyle(one);
    const text = numbers(one instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(one))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (large ? 3 : 4.5)) found.push(`${one.tagName} ${one.textContent.slice(0, 40)} ${contrast.toFixed(2)}`);
  }
  return found;
}
