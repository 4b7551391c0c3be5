// `$name` and `${name:format}` in the texts of a dashboard.
//
// A scope maps a name to a text, to a variable ({value, text, options, multi, all, ...}) or to a
// function (path, format) -> text.
import { escapeRegex, formattedValueToString, getFieldDisplayName, getFieldDisplayValuesProxy }
  from '@grafana/data';

export const ALL = '$__all';

const REFERENCE = /\$(\w+)|\$\{(\w+)(?:\.([^:}]+))?(?::([^}]+))?\}/g;
export const list = (value) => (Array.isArray(value) ? value : [value]);

/** The values that a variable stands for; those of all its options where All is chosen. */
export function chosen({ value, options = [] }) {
  return list(value).includes(ALL) ? options.map((option) => option.value) : list(value);
}

/** As Grafana's Prometheus data source: alternatives of a regular expression where several can be. */
function promql(variable) {
  if (!variable.multi && !variable.includeAll) {
    return String(variable.value ?? '').replaceAll('\\', '\\\\').replaceAll('"', '\\"');
  }
  const escaped = chosen(variable).map((value) => escapeRegex(String(value)).replaceAll('\\', '\\\\'));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

const FORMATS = {
  promql,
  glob: (variable) => (chosen(variable).length === 1 ? chosen(variable)[0] : `{${chosen(variable)}}`),
  percentencode: (variable) => encodeURIComponent(chosen(variable)),
  queryparam: (variable) => list(variable.value)
    .map((value) => `var-${variable.name}=${encodeURIComponent(value)}`).join('&'),
  raw: (variable) => chosen(variable).join(','),
  regex: (variable) => chosen(variable).map((value) => escapeRegex(String(value))).join('|'),
  text: (variable) => list(variable.value).map((value) => (value === ALL ? 'All'
    : variable.options?.find((option) => option.value === value)?.label ?? value)).join(' + '),
};
FORMATS.csv = FORMATS.raw;
FORMATS.uriencode = FORMATS.percentencode;

/** Replace the references to what the scope has; others stay as they are. */
export function expand(text, scope, format = 'glob') {
  return String(text ?? '').replace(REFERENCE, (reference, plain, name, path, own) => {
    const entry = Object.hasOwn(scope, plain ?? name) ? scope[plain ?? name] : undefined;
    if (entry === undefined) {
      return reference;
    }
    if (typeof entry === 'object') {
      const isAll = entry.allValue && list(entry.value).includes(ALL) && own !== 'queryparam';
      return isAll ? entry.allValue : (FORMATS[own ?? format] ?? FORMATS.glob)(entry);
    }
    return typeof entry === 'function' ? entry(path, own ?? format) : entry;
  });
}

/** `__from`, `__range` and the like of a time range, and what links pass on. */
export function timeScope(range, variables) {
  const seconds = Math.round((range.to - range.from) / 1000);
  const raw = (time) => (typeof time === 'string' ? time : String(time.valueOf()));
  return {
    __range: `${seconds}s`, __range_s: String(seconds), __range_ms: String(seconds * 1000),
    __from: String(range.from.valueOf()), __to: String(range.to.valueOf()),
    __url_time_range: () => `from=${raw(range.raw.from)}&to=${raw(range.raw.to)}`,
    __all_variables: () => Object.values(variables).map(FORMATS.queryparam).join('&'),
  };
}

/** `__value`, `__field` and `__data` of a value that has links. */
export function cellScope({ frame, field, rowIndex, calculatedValue, data }) {
  const encode = (text, format) => (/encode$/.test(format) ? encodeURIComponent(text) : String(text));
  const shown = calculatedValue ?? field.display(field.values[rowIndex]);
  const value = { raw: calculatedValue?.numeric ?? field.values[rowIndex], numeric: shown.numeric,
    text: formattedValueToString(shown) };
  return {
    __value: (path, format) => encode(value[path] ?? value.text, format),
    __field: (path, format) => encode(path?.startsWith('labels.') ? field.labels?.[path.slice(7)] ?? ''
      : getFieldDisplayName(field, frame, data), format),
    __data: (path = '', format) => {
      const name = path.replace(/^fields(\.|\[["']?)/, '').replace(/["']?\]$/, '');
      return encode(getFieldDisplayValuesProxy({ frame, rowIndex })[name] ?? '', format);
    },
  };
}
