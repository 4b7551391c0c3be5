// Variables of a dashboard: their options and values, and `$name`, `${name:format}` in texts.
//
// A scope maps a name to a text, to a variable ({value, text, options, multi, all, ...}) or to a
// function (path, format) -> text.
import { dateTime, escapeRegex, formattedValueToString, getFieldDisplayName,
  getFieldDisplayValuesProxy } from '@grafana/data';
import { labelValues, query } from './prometheus.js';

export const ALL = '$__all';

const REFERENCE = /\$(\w+)|\$\{(\w+)(?:\.([^:}]+))?(?::([^}]+))?\}/g;
const list = (value) => (Array.isArray(value) ? value : [value]);

/** The values that a variable stands for; those of all its options where All is chosen. */
export function chosen({ value, options = [] }) {
  return list(value).includes(ALL) ? options.map((option) => option.value) : list(value);
}

/** As Grafana's Prometheus data source: alternatives of a regular expression where several can be. */
function promql(variable) {
  const values = chosen(variable);
  if (!variable.multi && !variable.includeAll) {
    return String(variable.value ?? '').replaceAll('\\', '\\\\').replaceAll('"', '\\"');
  }
  const escaped = values.map((value) => escapeRegex(String(value)).replaceAll('\\', '\\\\'));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

const FORMATS = {
  promql,
  csv: (variable) => chosen(variable).join(','),
  doublequote: (variable) => chosen(variable).map((value) => JSON.stringify(value)).join(','),
  glob: (variable) => (chosen(variable).length === 1 ? chosen(variable)[0] : `{${chosen(variable)}}`),
  json: (variable) => JSON.stringify(variable.value),
  percentencode: (variable) => encodeURIComponent(chosen(variable).join(',')),
  pipe: (variable) => chosen(variable).join('|'),
  queryparam: (variable) => list(variable.value)
    .map((value) => `var-${variable.name}=${encodeURIComponent(value)}`).join('&'),
  raw: (variable) => chosen(variable).join(','),
  regex: (variable) => {
    const escaped = chosen(variable).map((value) => escapeRegex(String(value)));
    return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
  },
  text: (variable) => (list(variable.value).includes(ALL) ? 'All' : list(variable.value).map((value) =>
    variable.options?.find((option) => option.value === value)?.label ?? value).join(' + ')),
};
FORMATS.uriencode = FORMATS.percentencode;

/** Replace the references to what the scope has; others stay as they are. */
export function expand(text, scope, format = 'glob') {
  return String(text ?? '').replace(REFERENCE, (reference, plain, name, path, own) => {
    const entry = Object.hasOwn(scope, plain ?? name) ? scope[plain ?? name] : undefined;
    if (entry === undefined) {
      return reference;
    }
    if (typeof entry === 'function') {
      return entry(path, own ?? format);
    }
    if (typeof entry === 'string') {
      return entry;
    }
    if (entry.allValue && list(entry.value).includes(ALL) && (own ?? format) !== 'queryparam') {
      return entry.allValue;
    }
    return (FORMATS[own ?? format] ?? FORMATS.glob)(entry);
  });
}

/** `__from`, `__range` and the like of a time range, and what links pass on. */
export function timeScope(range, variables) {
  const seconds = Math.round((range.to - range.from) / 1000);
  const moment = (time) => (path, format) => (/^date/.test(format)
    ? (format === 'date:seconds' ? String(time.unix()) : time.toISOString()) : String(time.valueOf()));
  const raw = (time) => (typeof time === 'string' ? time : String(time.valueOf()));
  return {
    __range: `${seconds}s`, __range_s: String(seconds), __range_ms: String(seconds * 1000),
    __from: moment(range.from), __to: moment(range.to),
    __url_time_range: () => `from=${raw(range.raw.from)}&to=${raw(range.raw.to)}`,
    __all_variables: () => Object.values(variables).map(FORMATS.queryparam).join('&'),
  };
}

/** `__value`, `__field`, `__series` and `__data` of a cell that has links. */
export function cellScope({ frame, field, rowIndex, calculatedValue, data }) {
  const encode = (text, format) => (/encode$/.test(format) ? encodeURIComponent(text) : String(text));
  const value = () => {
    const shown = calculatedValue ?? field.display?.(field.values[rowIndex]) ?? {};
    const raw = calculatedValue?.numeric ?? field.values[rowIndex];
    return { raw, numeric: shown.numeric, text: formattedValueToString(shown) };
  };
  return {
    __value: (path, format) => encode(value()[path] ?? value().text, format),
    __field: (path, format) => encode(path?.startsWith('labels.') ? field.labels?.[path.slice(7)] ?? ''
      : getFieldDisplayName(field, frame, data), format),
    __series: (path, format) => encode(frame.name ?? getFieldDisplayName(field, frame, data), format),
    __data: (path = '', format) => {
      const [, dotted, quoted, rest] = path.match(/^fields(?:\.([^.[]+)|\[["']?(.*?)["']?\])(?:\.(\w+))?$/) ?? [];
      const cell = getFieldDisplayValuesProxy({ frame, rowIndex })[dotted ?? quoted];
      return cell ? encode(rest ? cell[rest] : cell, format) : '';
    },
  };
}

const COLLATOR = new Intl.Collator(undefined, { numeric: true });
const SORTS = [ // of Grafana: a kind, rising and falling
  (a, b) => (a < b ? -1 : a > b ? 1 : 0),
  (a, b) => parseFloat(a) - parseFloat(b),
  (a, b) => SORTS[0](a.toLowerCase(), b.toLowerCase()),
  COLLATOR.compare,
];

async function fetchOptions(variable, scope, range) {
  const text = expand(variable.query?.query ?? variable.query ?? variable.definition, scope, 'promql');
  const ofLabel = text.match(/^label_values\((?:(.+),\s*)?([\w.]+)\s*\)$/s);
  if (ofLabel) {
    return labelValues(ofLabel[2], ofLabel[1], range);
  }
  const promQL = text.match(/^query_result\((.+)\)\s*$/s)?.[1];
  if (!promQL) {
    throw new Error(`cannot read the query of the variable ${variable.name}: ${text}`);
  }
  const { result } = await query(promQL, range);
  return result.map(({ metric: { __name__ = '', ...labels }, value: [time, value] }) => {
    const inner = Object.entries(labels).map(([name, label]) => `${name}="${label}"`).join(',');
    return `${__name__}{${inner}} ${value} ${time * 1000}`;
  });
}

async function optionsOf(variable, scope, range) {
  if (variable.type !== 'query') {
    const words = String(variable.query ?? '').split(/(?<!\\),/).map((word) => word.trim());
    return words.filter(Boolean).map((word) => {
      const [label, value] = variable.type === 'custom' ? word.split(/\s+:\s+/) : [word];
      return { label, value: value ?? label };
    });
  }
  let values = await fetchOptions(variable, scope, range);
  const parts = expand(variable.regex, scope).match(/^\/(.*)\/([a-z]*)$/);
  if (parts) {
    const regex = new RegExp(parts[1], parts[2].replace('g', ''));
    values = values.map((value) => value.match(regex)).filter(Boolean)
      .map((match) => match.groups?.value ?? match.groups?.text ?? match[1] ?? match[0]);
  }
  values = [...new Set(values)];
  if (variable.sort) {
    values.sort(SORTS[Math.ceil(variable.sort / 2) - 1]);
    if (variable.sort % 2 === 0) {
      values.reverse();
    }
  }
  return values.map((value) => ({ label: value, value }));
}

/** What is chosen: in the address, else in the dashboard, else the first option. */
function valueOf(variable, options, address) {
  const wanted = address.getAll(`var-${variable.name}`);
  if (wanted.length) {
    return variable.multi ? wanted : wanted[0];
  }
  const known = list(variable.current?.value ?? []).filter((value) =>
    (value === ALL && variable.includeAll) || options.some((option) => option.value === value));
  const value = known.length ? known : [variable.includeAll ? ALL : options[0]?.value ?? ''];
  return variable.multi ? value : value[0];
}

/** Resolve the variables in their order; returns them by name, and the first error. */
export async function resolveVariables(dashboard, address, range) {
  const variables = {};
  let error;
  for (const model of dashboard.templating?.list ?? []) {
    const scope = { ...timeScope(range, variables), ...variables };
    const known = model.type === 'datasource' ? [{ label: 'Prometheus', value: 'prometheus' }]
      : await optionsOf(model, scope, range).catch((problem) => { error ??= problem; return []; });
    const value = model.type === 'datasource' ? 'prometheus' : valueOf(model, known, address);
    variables[model.name] = { ...model, options: known, value };
  }
  return { variables, error };
}

export const toDateTime = (text) => dateTime(/^\d+$/.test(text) ? Number(text) : text);
