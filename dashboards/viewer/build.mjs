// Builds ../hpml_dashboards/viewer: one script, one style sheet, the page, licences, and digests of all.
import { createHash } from 'node:crypto';
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { build } from 'esbuild';

const OUT = '../hpml_dashboards/viewer';
const UI = 'node_modules/@grafana/ui/dist';
const text = (path) => readFileSync(path, 'utf8');
const files = (folder) => readdirSync(folder).sort().map((name) => join(folder, name));

// Parts of @grafana/ui that no panel needs: editors, maps, telemetry.
const UNUSED = new RegExp('^(monaco-editor|react-monaco-editor|@monaco-editor/|@codemirror/|ol($|/)'
  + '|jquery|slate|@grafana/slate-react|@grafana/faro)');

const plugin = {
  name: 'viewer',
  setup(build) {
    build.onResolve({ filter: UNUSED }, ({ path }) => ({ path, namespace: 'unused' }));
    build.onLoad({ filter: /./, namespace: 'unused' }, () => ({ contents: 'module.exports = {}' }));
    // Icons are drawn from the bundle: @grafana/ui would fetch each one from a Grafana server.
    build.onResolve({ filter: /^react-inlinesvg$/ }, () => ({ path: join(process.cwd(), 'src/icon.jsx') }));
    build.onResolve({ filter: /^icons$/ }, ({ path }) => ({ path, namespace: 'icons' }));
    build.onLoad({ filter: /./, namespace: 'icons' }, () => ({
      loader: 'json',
      contents: JSON.stringify(Object.fromEntries(
        ['mono', 'solid', 'unicons'].flatMap((kind) => files(`${UI}/public/img/icons/${kind}`)
          .map((path) => [path.split('/').slice(-2).join('/'), text(path)])))),
    }));
    // The fonts are in viewer.css.
    build.onLoad({ filter: /GlobalStyles\/fonts\.mjs$/ }, () => ({
      contents: 'export const getFontStyles = () => ({})',
    }));
    // Time zones of these ten years: 40 kB in place of 700 kB.
    build.onLoad({ filter: /moment-timezone.data.packed.latest\.json$/ }, () => ({
      loader: 'json',
      contents: text('node_modules/moment-timezone/builds/moment-timezone-with-data-10-year-range.js')
        .match(/loadData\((\{[^]*?\n\t\})\)/)[1],
    }));
  },
};

function licences(inputs) {
  const folders = new Set(Object.keys(inputs).map(
    (path) => path.match(/^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//)?.[1]).filter(Boolean));
  folders.add('node_modules/@fontsource/inter');
  const users = new Map(); // text -> the packages under it
  for (const folder of [...folders].sort()) {
    const { name, version, license } = JSON.parse(text(join(folder, 'package.json')));
    const file = readdirSync(folder).find((entry) => /^(licen[cs]e|copying|mit)/i.test(entry));
    const terms = file ? text(join(folder, file)).trim() : `License: ${license}`;
    users.set(terms, [...(users.get(terms) ?? []), `${name} ${version} (${license})`]);
  }
  return [...users].map(([terms, names]) => `${[...new Set(names)].join('\n')}\n\n${terms}\n`)
    .join(`\n${'-'.repeat(80)}\n\n`);
}

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT, { recursive: true });
const { metafile } = await build({
  entryPoints: { viewer: 'src/main.jsx' }, outdir: OUT, bundle: true, minify: true, format: 'iife',
  target: 'es2022', jsx: 'automatic', metafile: true, legalComments: 'none', logLevel: 'warning',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.woff2': 'dataurl' }, plugins: [plugin],
});
writeFileSync(join(OUT, 'index.html'), text('index.html'));
writeFileSync(join(OUT, 'LICENSES.txt'), licences(metafile.inputs));
// In the format of sha256sum, seen from this folder: `sha256sum --check` tells a stale bundle.
const sources = ['build.mjs', 'index.html', 'package.json', 'package-lock.json', ...files('src')];
const built = files(OUT);
const digest = (path) => createHash('sha256').update(readFileSync(path)).digest('hex');
const sums = [...sources, ...built].map((path) => `${digest(path)}  ${path}\n`);
writeFileSync(join(OUT, 'SHA256SUMS'), sums.join(''));
for (const path of built) {
  console.log(`${basename(path)}: ${Math.round(readFileSync(path).length / 1024)} KiB`);
}
