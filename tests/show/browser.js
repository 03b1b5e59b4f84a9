// Opens a page in Debian's chromium, does what a person does, and prints what came of it as one line of JSON.
// node browser.js CHROMIUM FILE WIDTH SCHEME
"use strict";
const { chromium } = require("playwright-core");

const [executablePath, file, width, colorScheme] = process.argv.slice(2);
const told = { console: [], errors: [], requests: [] };

// Pixels of the canvas that aren't its ground, and a sum that changes with any of them.
const pixels = () => {
  const canvas = document.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let drawn = 0, sum = 0;
  for (let at = 0; at < data.length; at += 4) {
    const value = (data[at] << 16) | (data[at + 1] << 8) | data[at + 2];
    if (data[at] !== data[0] || data[at + 1] !== data[1] || data[at + 2] !== data[2]) drawn++;
    sum = (sum * 31 + value) >>> 0;
  }
  return { drawn, sum };
};

async function main() {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  const context = await browser.newContext({ viewport: { width: Number(width), height: 900 }, colorScheme });
  const page = await context.newPage();
  // Reading the canvas back is what this driver does, not the page.
  page.on("console", (message) => message.text().startsWith("Canvas2D:") || told.console.push(message.text()));
  page.on("pageerror", (error) => told.errors.push(error.message));
  page.on("request", (request) => told.requests.push(request.url()));
  await page.goto(`file://${file}`);
  await page.waitForSelector("main");
  const settled = () => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const look = async () => {
    await settled();
    return { ...(await page.evaluate(pixels)), span: await page.textContent("#span") };
  };
  told.title = await page.title();
  told.text = await page.innerText("main");
  told.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  told.ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  told.hacked = await page.evaluate(() => window.hacked ?? null);
  if (await page.$("canvas")) {
    told.whole = await look();
    await page.click("#zoom-in");
    told.zoomed = await look();
    await page.focus("canvas");
    await page.keyboard.press("ArrowRight");
    told.moved = await look();
    await page.keyboard.press("0");
    told.fitted = await look();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("n");
    told.chosen = await page.innerText(".detail");
    await page.keyboard.press("Escape");
    await page.fill("#filter", "7");
    await page.keyboard.press("Enter");
    told.filtered = { ...(await look()), said: await page.innerText("[role=status]"), faint: await page.evaluate(() => view.filter?.size ?? 0) };
    await page.fill("#filter", "9999");
    await page.keyboard.press("Enter");
    told.unknown = { said: await page.innerText("[role=status]"), invalid: await page.getAttribute("#filter", "aria-invalid") };
    await page.click("#requests td button");
    told.story = { text: await page.innerText(".story"), bars: await page.locator(".fall .lane i").count() };
    await page.click("#requests th:first-child button");
    told.sorted = await page.getAttribute("#requests th:first-child", "aria-sort");
  }
  // Which elements the Tab key comes to, and whether each has a name.
  told.unnamed = await page.evaluate(() =>
    [...document.querySelectorAll("button, input, canvas, [tabindex='0']")].filter(
      (each) => !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length)).map((each) => each.outerHTML));
  // The negative control: had the page wanted to, it couldn't have.
  told.fetched = await page.evaluate(() => fetch("http://127.0.0.1:9/").then(() => "came", (error) => error.name));
  await browser.close();
  process.stdout.write(JSON.stringify(told) + "\n");
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
