// Builds the console into the folder that the package carries. build.json there names the sources that it was built of.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const built = join(here, "..", "gateway", "watch", "console", "static");
const copied = ["index.html", "icon.svg"];
const bundled = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];
const sources = ["build.mjs", "package-lock.json", "tsconfig.json", "src", ...copied];

const settings = {
  absWorkingDir: here,
  entryPoints: { console: "src/main.tsx", theme: "src/theme.ts" },
  outdir: built,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
};

function* filesUnder(path) {
  if (!statSync(path).isDirectory()) yield path;
  else for (const name of readdirSync(path).sort()) yield* filesUnder(join(path, name));
}

// The same sum is made in tests/gateway/watch/console/test_built_files.py: paths in order, each with the sum of its file.
function sumSources() {
  const whole = createHash("sha256");
  const paths = sources.flatMap((each) => [...filesUnder(join(here, each))].map((path) => relative(here, path)));
  for (const path of paths.sort()) {
    whole.update(`${path} ${createHash("sha256").update(readFileSync(join(here, path))).digest("hex")}\n`);
  }
  return whole.digest("hex");
}

// The libraries whose code is in the bundle ask that their notices go with it.
function readLicense(name) {
  return `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`;
}

function copy() {
  for (const name of copied) cpSync(join(here, name), join(built, name));
  writeFileSync(join(built, "licenses.txt"), bundled.map(readLicense).join("\n"));
  writeFileSync(join(built, "build.json"), `${JSON.stringify({ sources: sumSources() })}\n`);
}

rmSync(built, { recursive: true, force: true });
mkdirSync(built, { recursive: true });
if (process.argv.includes("--watch")) {
  copy();
  await (await esbuild.context(settings)).watch();
} else {
  await esbuild.build(settings);
  copy();
}
