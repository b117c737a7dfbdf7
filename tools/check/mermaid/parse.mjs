// Parses Mermaid diagrams: reads a JSON list of texts, and writes a list of errors, "" for a text that parses.
import { JSDOM } from "jsdom";
import { readFileSync } from "node:fs";

// Mermaid sanitizes labels with DOMPurify, which needs a document.
const { window } = new JSDOM("");
globalThis.window = window;
globalThis.document = window.document;
const { default: mermaid } = await import("mermaid");

const errors = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
	try {
		await mermaid.parse(text);
		errors.push("");
	} catch (error) {
		errors.push(String(error.message ?? error) || "no reason given");
	}
}
process.stdout.write(JSON.stringify(errors));
