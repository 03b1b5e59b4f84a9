// Opens pages of the served site in Debian's chromium, searches, and prints what came of it as one line of JSON.
// node site.js CHROMIUM BASE WIDTH SCHEME PAGE...
"use strict";
const { chromium } = require("playwright-core");

const [executablePath, base, width, colorScheme, ...pages] = process.argv.slice(2);
const told = { console: [], errors: [], foreign: [], overflow: {}, grounds: [] };

async function main() {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  const context = await browser.newContext({ viewport: { width: Number(width), height: 900 }, colorScheme });
  const page = await context.newPage();
  page.on("console", (message) => told.console.push(message.text()));
  page.on("pageerror", (error) => told.errors.push(error.message));
  page.on("request", (request) => /^(data:|blob:)/.test(request.url()) || request.url().startsWith(base) || told.foreign.push(request.url()));
  for (const name of pages) {
    await page.goto(`${base}/${name}`);
    await page.waitForLoadState("networkidle");
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (over > 0) told.overflow[name] = over;
    told.grounds.push(await page.evaluate(() => getComputedStyle(document.body).backgroundColor));
  }
  await page.keyboard.press("/"); // opens the search, which on a phone is behind a button
  await page.keyboard.type("arena");
  await page.waitForSelector(".md-search-result__item");
  told.found = await page.locator(".md-search-result__item").count();
  await browser.close();
  process.stdout.write(JSON.stringify(told) + "\n");
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
