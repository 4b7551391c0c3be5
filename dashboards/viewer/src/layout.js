// Where each panel lies: Grafana's grid of 24 columns, with rows that fold and panels that repeat.
import { chosen, expand } from './template.js';

const COLUMNS = 24;

/** One scope per value of the variable that a panel or row repeats for; itself without one. */
function repeats(name, scope) {
  const variable = name && scope[name];
  return variable ? chosen(variable).map((value) => ({ ...scope, [name]: { ...variable, value } })) : [scope];
}

/** Place panels below each other as their grid says; those below a repeated one move down. */
function place(panels, scope, key) {
  const placed = [];
  const top = Math.min(...panels.map(({ gridPos }) => gridPos.y));
  const pushes = []; // {from, by}: what lies at or below `from` moves down
  for (const panel of panels) {
    const { x, y, w, h } = panel.gridPos;
    const moved = pushes.reduce((sum, { from, by }) => sum + (y >= from ? by : 0), 0);
    const scopes = repeats(panel.repeat, scope);
    const across = panel.repeat && panel.repeatDirection !== 'v'
      ? Math.min(scopes.length, panel.maxPerRow ?? 4) : 1;
    const width = panel.repeat && panel.repeatDirection !== 'v' ? Math.floor(COLUMNS / across) : w;
    scopes.forEach((own, index) => placed.push({
      panel, scope: own, key: `${key}/${panel.id}/${index}`,
      x: across > 1 ? (index % across) * width : x, w: width, h,
      y: y - top + moved + Math.floor(index / across) * h,
    }));
    pushes.push({ from: y + h, by: (Math.max(1, Math.ceil(scopes.length / across)) - 1) * h });
  }
  return placed;
}

/** The rows of a dashboard in order, the first without a title: {title, key, folded, placed, height}. */
export function rowsOf(dashboard, scope) {
  const inOrder = [...dashboard.panels].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x);
  const rows = [{ row: {}, panels: [] }];
  for (const panel of inOrder) {
    if (panel.type === 'row') {
      rows.push({ row: panel, panels: [...(panel.panels ?? [])] });
    } else {
      rows.at(-1).panels.push(panel);
    }
  }
  return rows.flatMap(({ row, panels }) => repeats(row.repeat, scope).map((own, index) => {
    const key = `${row.id ?? 'top'}/${index}`;
    const placed = place(panels, own, key);
    return { key, placed, title: row.title === undefined ? undefined : expand(row.title, own, 'text'),
      folded: Boolean(row.collapsed), height: Math.max(0, ...placed.map(({ y, h }) => y + h)) };
  }));
}
