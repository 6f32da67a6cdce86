// Accessibility checks of the page as it stands, after the rules of axe that matter here. Returns findings in words.
const findings = [];
const visible = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
const named = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""} “${element.textContent.trim().slice(0, 30)}”`;

const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) findings.push(`id ${id} stands twice`);
for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
  for (const element of document.querySelectorAll(`[${attribute}]`)) {
    for (const id of element.getAttribute(attribute).split(/\s+/)) {
      if (!document.getElementById(id)) findings.push(`${attribute} of ${named(element)} names ${id}, which is not there`);
    }
  }
}
if (!document.documentElement.lang) findings.push("no language");
if (!document.title) findings.push("no title");
if (document.querySelectorAll("h1").length !== 1) findings.push("not exactly one h1");
if (document.querySelectorAll("main").length !== 1) findings.push("not exactly one main");
let level = 0;
for (const heading of document.querySelectorAll("h1,h2,h3,h4,h5,h6")) {
  if (!visible(heading)) continue;
  const own = Number(heading.tagName[1]);
  if (own > level + 1) findings.push(`${named(heading)} skips a level`);
  level = own;
}
for (const element of document.querySelectorAll("[tabindex]")) if (element.tabIndex > 0) findings.push(`${named(element)} has a positive tabindex`);

// Small targets are hard to hit: 24 CSS pixels each way (WCAG 2.5.8).
for (const control of document.querySelectorAll("button, input:not([type=checkbox]), select, textarea, summary")) {
  const box = control.getBoundingClientRect();
  if (visible(control) && (box.width < 24 || box.height < 24)) findings.push(`${named(control)} is ${box.width}×${box.height}`);
}

// Contrast of every visible text against the nearest ground that is not transparent.
const channels = (colour) => {
  const numbers = colour.match(/[\d.]+/g).map(Number);
  return { rgb: numbers.slice(0, 3), alpha: numbers[3] ?? 1 };
};
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const groundOf = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const { rgb, alpha } = channels(getComputedStyle(at).backgroundColor);
    if (alpha === 1) return rgb;
  }
  return channels(getComputedStyle(document.documentElement).colorScheme.includes("dark") ? "rgb(0,0,0)" : "rgb(255,255,255)").rgb;
};
for (const element of document.querySelectorAll("body *")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const isField = element.matches("input, textarea, select");
  if (!(hasText || isField) || !visible(element) || element.closest(":disabled, noscript, option")) continue;
  const [ink, ground] = [luminance(channels(getComputedStyle(element).color).rgb), luminance(groundOf(element))];
  const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
  if (contrast < 4.5) findings.push(`${named(element)} has a contrast of ${contrast.toFixed(2)}`);
}
if (document.documentElement.scrollWidth > innerWidth) findings.push(`the page is ${document.documentElement.scrollWidth} wide, the window ${innerWidth}`);
return findings;
