// The page: an address such as /d/hpml-job?var-jobid=17&from=now-1h&to=now is all its state.
import { createTheme, dateTime, dateTimeForTimeZone, rangeUtil, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { Alert, GlobalStyles, Icon, PortalContainer } from '@grafana/ui';
import { useCallback, useMemo, useRef, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { useAsync, useEvent, useInterval, useLocalStorage, useLocation, useMeasure, useMedia,
  useTitle } from 'react-use';
import { rowsOf } from './layout.js';
import { Panel } from './panel.jsx';
import { get } from './prometheus.js';
import { timeScope } from './template.js';
import { TimeControls, Toolbar } from './toolbar.jsx';
import { resolveVariables } from './variables.js';
import './viewer.css';

const HOME = 'hpml-cluster';
const PHONE_PIXELS = 769; // as Grafana: one column below
const NARROW_PIXELS = 600; // two figures side by side instead of four
const GAP = 8;
const STEP = 38; // pixels from one row of the grid to the next

const isPlain = ({ button, ctrlKey, metaKey, shiftKey }) => !(button || ctrlKey || metaKey || shiftKey);

/** Links to dashboards change the address without a reload. */
function followLink(event) {
  const link = event.target.closest?.('a[href^="/d/"]:not([target=_blank])');
  if (link && isPlain(event)) {
    event.preventDefault();
    history.pushState(null, '', link.getAttribute('href'));
    window.scrollTo(0, 0);
  }
}

function useTheme() {
  const isLight = useMedia('(prefers-color-scheme: light)', false);
  const [stored, setStored] = useLocalStorage('theme');
  const mode = new URLSearchParams(location.search).get('theme') ?? stored ?? (isLight ? 'light' : 'dark');
  return [useMemo(() => createTheme({ colors: { mode } }), [mode]), setStored];
}

function rangeOf(parameters, dashboard, timeZone) {
  const read = (text) => {
    if (/^\d+$/.test(text)) {
      return dateTimeForTimeZone(timeZone, Number(text));
    }
    return text.startsWith('now') ? text : dateTime(text);
  };
  const of = (from, to) => rangeUtil.convertRawToRange({ from: read(from), to: read(to) }, timeZone);
  const own = dashboard.time ?? { from: 'now-1h', to: 'now' };
  const range = of(parameters.get('from') ?? own.from, parameters.get('to') ?? own.to);
  return range.from.isValid() && range.to.isValid() && range.from < range.to ? range : of(own.from, own.to);
}

/** A dashboard with its time range and the values of its variables. */
async function viewOf(dashboard, search) {
  const parameters = new URLSearchParams(search);
  const timeZone = parameters.get('timezone') ?? (dashboard.timezone || 'browser');
  const range = rangeOf(parameters, dashboard, timeZone);
  const { variables, error } = await resolveVariables(dashboard, parameters, range);
  const scope = { ...timeScope(range, variables), ...variables, __dashboard: dashboard.title };
  return { dashboard, range, timeZone, variables, scope, error };
}

function Row({ row, width, view, onZoom, sync }) {
  const [choice, setChoice] = useState(); // undefined until somebody folds or unfolds it
  const [empty, setEmpty] = useState(false);
  const known = useRef(new Map()); // whether a panel has data, by its key
  const onData = useCallback((key, hasData) => {
    known.current.set(key, hasData);
    // Not again once it is folded: its panels ask nothing then.
    setEmpty(known.current.size === row.placed.length && ![...known.current.values()].some(Boolean));
  }, [row.placed.length]);
  const folded = choice ?? (row.folded || (empty && row.title !== undefined));
  const unit = (width - 23 * GAP) / 24;
  const isPhone = width < PHONE_PIXELS;
  const across = width < NARROW_PIXELS ? 2 : 4; // figures stand side by side where all else is stacked
  const stacked = ({ type }) => (type === 'stat' ? (width - (across - 1) * GAP) / across : width);
  const box = ({ x, y, w, h }, panel) => (isPhone ? { width: stacked(panel), height: h * STEP - GAP } : {
    position: 'absolute', left: x * (unit + GAP), top: y * STEP,
    width: w * (unit + GAP) - GAP, height: h * STEP - GAP });
  return (
    <section aria-label={row.title}>
      {row.title !== undefined && (
        <h2 className="row-title">
          <button type="button" aria-expanded={!folded} onClick={() => setChoice(!folded)}>
            <Icon name={folded ? 'angle-right' : 'angle-down'} /> {row.title}
            {' '}
            {folded && <small>({row.placed.length} panels{empty && ', nothing measured'})</small>}
          </button>
        </h2>
      )}
      {!folded && (
        <div className={isPhone ? 'column' : 'grid'} style={{ height: isPhone ? 'auto' : row.height * STEP }}>
          {row.placed.map(({ panel, key, scope, ...place }) => {
            const style = box(place, panel);
            return (
              <div key={key} style={style}>
                <Panel json={panel} scope={scope} view={view} width={style.width} height={style.height}
                  onZoom={onZoom} sync={sync} onData={(hasData) => onData(key, hasData)} />
              </div>
            );
          })}
        </div>
      )}
    </section>
  );
}

function App() {
  const { pathname, search } = useLocation();
  const uid = pathname.split('/')[2] || HOME;
  const [theme, setTheme] = useTheme();
  const [tick, setTick] = useState(0);
  const [ref, { width }] = useMeasure();
  const { value: dashboards = [] } = useAsync(() => get('/api/dashboards'), []);
  const loaded = useAsync(() => get(`/api/dashboards/${uid}`), [uid]);
  const dashboard = loaded.loading ? undefined : loaded.value;
  const viewed = useAsync(async () => dashboard && viewOf(dashboard, search), [dashboard, search, tick]);
  const view = viewed.value?.dashboard === dashboard ? viewed.value : undefined;
  const parameters = new URLSearchParams(search);
  const refresh = parameters.get('refresh') ?? dashboard?.refresh ?? '';

  useTitle(`${dashboard?.title ?? 'Dashboards'} - hpml`);
  useEvent('click', followLink, document);
  useInterval(() => document.hidden || setTick(tick + 1),
    /^\d/.test(refresh) ? rangeUtil.intervalToMs(refresh) : null);

  const setParameters = (changes) => {
    for (const [name, values] of Object.entries(changes)) {
      parameters.delete(name);
      [values].flat().forEach((value) => parameters.append(name, value));
    }
    history.pushState(null, '', `/d/${uid}?${parameters}`);
  };
  const onTheme = (mode) => {
    setTheme(mode);
    setParameters({ theme: [] });
  };
  const onTime = (from, to) => setParameters({ from, to });
  const onZoom = ({ from, to }) => onTime(String(Math.round(from)), String(Math.round(to)));
  const sync = useCallback(() => dashboard?.graphTooltip ?? 0, [dashboard]);
  const problem = loaded.error ?? view?.error;

  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PortalContainer />
      <Toolbar {...{ dashboard, dashboards, view, setParameters, onTheme }}>
        {view && (
          <TimeControls view={view} onTime={onTime} refresh={refresh} onRefreshNow={() => setTick(tick + 1)}
            onRefresh={(value) => setParameters({ refresh: value })}
            onTimeZone={(timezone) => setParameters({ timezone })} />
        )}
      </Toolbar>
      <main>
        {problem && <Alert title={problem.message} severity="error" />}
        <div ref={ref}>
          {view && width > 0 && rowsOf(dashboard, view.scope).map((row) => (
            <Row key={`${uid}/${row.key}`} {...{ row, width, view, onZoom, sync }} />
          ))}
        </div>
      </main>
    </ThemeContext.Provider>
  );
}

initPluginTranslations('hpml').then(() => createRoot(document.getElementById('root')).render(<App />));
