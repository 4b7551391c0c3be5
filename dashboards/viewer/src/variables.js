// The variables of a dashboard: their options, from Prometheus or listed, and what is chosen.
import { labelValues, query } from './prometheus.js';
import { ALL, expand, list, timeScope } from './template.js';

const { compare } = new Intl.Collator(undefined, { numeric: true });

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
    return String(variable.query ?? '').split(',').map((word) => {
      const [label, value] = word.trim().split(/\s+:\s+/);
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
  if (variable.sort) { // odd numbers rise, even ones fall
    values.sort(variable.sort % 2 ? compare : (a, b) => compare(b, a));
  }
  return values.map((value) => ({ label: value, value }));
}

/** What is chosen: in the address, else in the dashboard, else the first option; hidden ones cannot be stale. */
function valueOf(variable, options, address) {
  const wanted = address.getAll(`var-${variable.name}`);
  if (wanted[0] && (variable.hide !== 2 || options.some(({ value }) => value === wanted[0]))) {
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
