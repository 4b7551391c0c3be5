// Prometheus' HTTP API, and its answers as data frames with overrides and transformations applied.
import { applyFieldOverrides, cacheFieldDisplayNames, createDataFrame, FieldConfigOptionsRegistry,
  FieldType, rangeUtil, sortThresholds, standardTransformers, standardTransformersRegistry,
  transformDataFrame } from '@grafana/data';
import { lastValueFrom } from 'rxjs';
import { cellScope, expand } from './template.js';

const SCRAPE_SECONDS = 15; // the default of Grafana's data source
const MAX_POINTS = 11_000; // of a series in one answer of Prometheus

standardTransformersRegistry.setInit(() => [...new Set(Object.values(standardTransformers))].map(
  ({ id, name, ...more }) => ({ id, name, transformation: async () => ({ id, name, ...more }) })));

/** GET something from the server that showed this page; its errors have a message for people. */
export async function get(path, parameters = {}, signal = undefined) {
  let response;
  try {
    response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { signal });
  } catch (error) {
    throw signal?.aborted ? error : new Error('hpml dashboards show has ended, or cannot be reached');
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok || answer.status === 'error') {
    throw new Error(answer.error ?? `${path}: ${response.status} ${response.statusText}`);
  }
  return answer;
}

const ofPrometheus = async (path, parameters, signal) =>
  (await get(`/api/v1/${path}`, parameters, signal)).data;

export const query = (promql, range, signal) =>
  ofPrometheus('query', { query: promql, time: range.to / 1000 }, signal);

export const labelValues = (label, match, range) => ofPrometheus(`label/${label}/values`,
  { start: range.from / 1000, end: range.to / 1000, ...(match && { 'match[]': match }) });

/** Seconds between two points of a chart that is so many pixels wide, as Grafana chooses them. */
export function stepSeconds(range, width, minimum) {
  const { intervalMs } = rangeUtil.calculateInterval(range, width, minimum ?? `${SCRAPE_SECONDS}s`);
  return Math.max(intervalMs / 1000, Math.ceil((range.to - range.from) / 1000 / MAX_POINTS));
}

function seriesName({ legendFormat, expr }, labels) {
  if (legendFormat && legendFormat !== '__auto') {
    return legendFormat.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  const pairs = Object.entries(labels).map(([name, value]) => `${name}="${value}"`);
  return pairs.length && legendFormat ? undefined : pairs.length ? `{${pairs.join(', ')}}` : expr;
}

const field = (name, type, values, more = {}) => ({ name, type, values, config: {}, ...more });

function tableFrame({ refId }, series, onlyTarget) {
  const rows = series.map(({ metric, value, values }) => ({ metric, point: value ?? values.at(-1) }));
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return createDataFrame({ refId, fields: [
    field('Time', FieldType.time, rows.map(({ point }) => point[0] * 1000)),
    ...labels.map((label) => field(label, FieldType.string, rows.map(({ metric }) => metric[label] ?? ''))),
    field(onlyTarget ? 'Value' : `Value #${refId}`, FieldType.number,
      rows.map(({ point }) => Number(point[1]))),
  ] });
}

/** A series on every step of its range, null where it has no sample: a chart would draw its last value on. */
function onSteps(values, { start, end, step }) {
  const known = new Map(values.map(([time, value]) => [Math.round((time - start) / step), Number(value)]));
  return Array.from({ length: Math.floor((end - start) / step) + 1 },
    (_, index) => [start + index * step, known.get(index) ?? null]);
}

/** The frames of an answer ({resultType, result}) to a target, as Grafana's data source makes them. */
function framesOf(target, { resultType, result, steps }, step, onlyTarget) {
  const series = resultType === 'scalar' ? [{ metric: {}, value: result }] : result;
  if (target.format === 'table') {
    return [tableFrame(target, series, onlyTarget)];
  }
  return series.map(({ metric: { __name__, ...labels }, value, values }) => {
    const points = values && steps ? onSteps(values, steps) : values ?? [value];
    const config = { displayNameFromDS: seriesName(target, labels) };
    return createDataFrame({ refId: target.refId, fields: [
      field('Time', FieldType.time, points.map((point) => point[0] * 1000),
        { config: { interval: step * 1000 } }),
      field('Value', FieldType.number, points.map(([, number]) => (number === null ? null : Number(number))),
        { labels, config }),
    ] });
  });
}

async function ask(target, range, step, signal) {
  if (target.instant) {
    return query(target.expr, range, signal);
  }
  const [start, end] = [range.from, range.to].map((time) => Math.floor(time / 1000 / step) * step);
  const answer = await ofPrometheus('query_range', { query: target.expr, start, end, step }, signal);
  return { ...answer, steps: { start, end, step } };
}

// Grafana keeps defaults in panel plugins, which are not published; these are the ones that show.
const DEFAULTS = {
  timeseries: { drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0,
    gradientMode: 'none', showPoints: 'auto', pointSize: 5, spanNulls: false, insertNulls: false,
    axisPlacement: 'auto', axisLabel: '', scaleDistribution: { type: 'linear' },
    stacking: { mode: 'none', group: 'A' }, thresholdsStyle: { mode: 'off' }, barAlignment: 0,
    barWidthFactor: 0.6, hideFrom: { tooltip: false, viz: false, legend: false } },
  table: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false },
};

/** A copy of a panel with its plugin's defaults; JSON has null where Grafana has -Infinity. */
export function withDefaults(json) {
  const panel = structuredClone({ ...json, options: json.options ?? {},
    fieldConfig: { overrides: [], ...json.fieldConfig, defaults: { ...json.fieldConfig?.defaults } } });
  const { defaults, overrides } = panel.fieldConfig;
  defaults.custom = { ...DEFAULTS[panel.type], ...defaults.custom };
  defaults.color ??= { mode: panel.type === 'timeseries' ? 'palette-classic' : 'thresholds' };
  defaults.thresholds ??= { mode: 'absolute', steps: [{ color: 'green' }, { value: 80, color: 'red' }] };
  const ofOverrides = overrides.flatMap(({ properties }) => properties).filter(({ id }) => id === 'thresholds');
  for (const { steps } of [defaults.thresholds, ...ofOverrides.map(({ value }) => value)]) {
    steps.forEach((step) => { step.value ??= -Infinity; });
    sortThresholds(steps);
  }
  return panel;
}

const STANDARD = ['color', 'decimals', 'description', 'displayName', 'fieldMinMax', 'filterable',
  'links', 'mappings', 'max', 'min', 'noValue', 'thresholds', 'unit'];
const OF_NUMBERS = new Set(['decimals', 'max', 'min', 'thresholds']);

/** The properties that fields of this panel can have: Grafana ignores those that no registry knows. */
function registryOf({ type, fieldConfig: { defaults, overrides } }, scope) {
  const ids = new Set([...STANDARD, ...Object.keys(defaults.custom).map((name) => `custom.${name}`),
    ...overrides.flatMap(({ properties }) => properties.map(({ id }) => id))]);
  const named = (text, { field }) => expand(text,
    { ...scope, __field: (path) => field.labels?.[path?.replace(/^labels\./, '')] ?? '' }, 'text');
  return new FieldConfigOptionsRegistry(() => [...ids].map((id) => {
    const isCustom = id.startsWith('custom.');
    return { id, name: id, isCustom, path: isCustom ? id.slice(7) : id,
      process: id === 'displayName' ? named : (value) => value,
      shouldApply: (field) => (isCustom ? type === 'table' || field.type !== FieldType.time
        : !OF_NUMBERS.has(id) || field.type === FieldType.number) };
  }));
}

/** Run a panel's queries; returns its frames, ready to draw. Rejects with what Prometheus said. */
export async function framesFor({ panel, scope, range, width, theme, timeZone, signal }) {
  const targets = (panel.targets ?? []).filter(({ hide, expr }) => !hide && expr);
  const answers = await Promise.all(targets.map(async (target) => {
    const minimum = expand(target.interval || panel.interval, scope) || undefined;
    const step = stepSeconds(range, panel.maxDataPoints ?? width, minimum);
    const rate = Math.max(step + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS);
    const steps = { __interval: `${step}s`, __interval_ms: String(step * 1000),
      __rate_interval: `${rate}s`, __rate_interval_ms: String(rate * 1000) };
    const expr = expand(target.expr, { ...scope, ...steps }, 'promql');
    const answer = await ask({ ...target, expr }, range, step, signal);
    const legendFormat = expand(target.legendFormat, scope, 'text');
    return framesOf({ ...target, expr, legendFormat }, answer, step, targets.length === 1);
  }));
  let frames = answers.flat();
  if (panel.type === 'timeseries') { // as Grafana's panel does: a chart has null for a gap, not NaN
    for (const { fields } of frames) {
      fields[1].values = fields[1].values.map((value) => (Number.isFinite(value) ? value : null));
    }
  }
  const transformations = (panel.transformations ?? []).filter(({ disabled }) => !disabled);
  if (transformations.length) {
    frames = await lastValueFrom(
      transformDataFrame(transformations, frames, { interpolate: (text) => expand(text, scope) }));
  }
  const replaceVariables = (text, { __dataContext: cell } = {}, format = undefined) =>
    expand(text, { ...scope, ...(cell && cellScope(cell.value)) }, format);
  frames = applyFieldOverrides({ data: frames, fieldConfig: panel.fieldConfig,
    fieldConfigRegistry: registryOf(panel, scope), replaceVariables, theme, timeZone });
  cacheFieldDisplayNames(frames); // the table's headers come from there
  return frames;
}
